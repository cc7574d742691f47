"""Configs that older versions wrote, in today's keys."""

from __future__ import annotations

from jaxtrain.config.tree import Node

RENAMED = {"model.init_from": "model.from"}
GONE = ("data.prefetch",)  # how many batches waited; it reached no result
GONE_IF_EMPTY = ("data.sources.*.weights",)  # `weight` is now also the map that this was


def today(key: str) -> str | None:
    """The name that a dotted key has today, None where it is no more."""
    return None if key in GONE else RENAMED.get(key, key)


def renewed(node: Node, at: str = "") -> Node:
    """A complete config (`resolved: true`), as a run's folder keeps it, in today's keys.

    What said something that can no longer be said stays, and is refused as unknown.
    """
    if isinstance(node.value, list):
        return Node([renewed(one, f"{at}.*") for one in node.value], node.where, node.origin)
    if not isinstance(node.value, dict):
        return node
    values = {}
    for key, child in node.value.items():
        path = f"{at}.{key}" if at else str(key)
        name = today(path)
        if name is not None and (child.value or path not in GONE_IF_EMPTY):
            values[key if name == path else name.rpartition(".")[2]] = renewed(child, path)
    return Node(values, node.where, node.origin)
