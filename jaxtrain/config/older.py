"""Configs of runs that older versions began: their keys that are no more, in today's."""

from __future__ import annotations

from jaxtrain.config.tree import Node


def renewed(tree: Node) -> Node:
    """A complete config (`resolved: true`), as a run's folder keeps it, without keys that have gone or are called
    something else. What said something that can no longer be said stays, and is refused as unknown."""
    values = dict(tree.value)
    if (data := _section(values, "data")) is not None:
        data.pop("prefetch", None)  # how many batches wait; it reached no result
        sources = data.get("sources")
        if sources is not None and isinstance(sources.value, list):
            data["sources"] = Node([_source(one) for one in sources.value], sources.where, sources.origin)
    model = _section(values, "model")
    if model is not None and "init_from" in model:
        model.setdefault("from", model.pop("init_from"))
    return Node(values, tree.where, tree.origin)


def _section(values: dict[str, Node], name: str) -> dict[str, Node] | None:
    """A copy of a section's keys, put in its place."""
    section = values.get(name)
    if section is None or not isinstance(section.value, dict):
        return None
    values[name] = Node(dict(section.value), section.where, section.origin)
    return values[name].value


def _source(source: Node) -> Node:
    """Weights from a step on are the map that `weight` is now; an empty one said nothing."""
    if not isinstance(source.value, dict) or "weights" not in source.value or source.value["weights"].value:
        return source
    kept = {key: node for key, node in source.value.items() if key != "weights"}
    return Node(kept, source.where, source.origin)
