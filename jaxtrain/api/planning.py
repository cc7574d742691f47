"""Plans and searches of layouts from Python. Other processes compile; this one does not import JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.errors import UserError
from jaxtrain.planning import pods, predict
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.hardware.link_rate import parse_rate
from jaxtrain.planning.report import figure as figure  # shows a plan in notebooks
from jaxtrain.planning.report import page as page
from jaxtrain.planning.report import terminal as terminal
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search.ranking import SearchResult
from jaxtrain.planning.search.search import search as rank_layouts
from jaxtrain.planning.target_config import config_for_target, decoder_vocabulary


def plan(
    config: ConfigSource, target: str, *overrides: str, slices: int | None = None, hlo: str | Path | None = None,
    whole: bool = False, dcn: str | None = None, server_dcn: str | None = None, **keys: Any,
) -> Plan:  # fmt: skip
    """Plans memory, communication and speed of a config's step on hardware that need not be there.

    Args:
        config: see `Trainer`; its data need not exist.
        target: such as `h100:8x8` or `v5p:8x8x8`.
        overrides: `key=value` texts.
        slices: number of TPU slices.
        hlo: file to which the text of the compiled program is written.
        whole: never extrapolate from smaller pods.
        dcn: rate at which a replica sends to the others, or an island to its server, such as `10Gbit`; default: the
            network of the target.
        server_dcn: rate of the link of each server of islands, both ways; default: that of an island.
        keys: sections or keys of the config; `model` and `loss` may be a class and a function that can be imported,
            because other processes compile.

    Raises:
        UserError: a bad config, target or rate, an object that cannot be imported, or a package that is not installed.
    """
    parsed = targets.parse(target, slices)
    if dcn is not None:
        parse_rate(dcn)
    if server_dcn is not None:
        parse_rate(server_dcn, "--server-dcn")
    named = {name: keys.pop(name) for name in ("model", "loss") if callable(keys.get(name))}
    loaded, vocab = config_for_target(config, *overrides, target=parsed, **keys, **_imported(**named))
    if server_dcn is not None and not (loaded.islands.has_islands and loaded.islands.servers):
        raise UserError("--server-dcn: the run has no server; expected islands.count=N and islands.servers above 0")
    if problem := targets.missing_packages(parsed, loaded.step.attention):
        raise UserError(problem)
    most = None if whole else pods.MAX_DEVICES
    return predict.predict(
        loaded, vocab, str(parsed), hlo=None if hlo is None else Path(hlo), max_devices=most, dcn=dcn,
        server_dcn=server_dcn,
    )  # fmt: skip


def search(
    config: ConfigSource, target: str, *overrides: str, slices: int | None = None, **options: Any
) -> SearchResult:
    """Ranks the layouts of a config on hardware that need not be there.

    Args:
        config: see `Trainer`; its data need not exist.
        target: such as `h100:8x8`.
        overrides: `key=value` texts.
        slices: number of TPU slices.
        options: `devices`, `objective`, `budget` (seconds), `top`, `jobs`, `cache`, `progress`, see
            `planning.search.search.search`.

    Raises:
        UserError: a bad config or target, or no legal layout.
    """
    loaded = load_config(config, *overrides, paths=False, checks=())  # its mesh is for this machine, not the target
    if count := loaded.islands.count:
        expected = "expected islands.count=0, and the rows of one island as data.global_batch"
        raise UserError(f"islands.count: a search is of one program, and there are {count} islands; {expected}")
    return rank_layouts(loaded, decoder_vocabulary(loaded), str(targets.parse(target, slices)), **options)


def _imported(**objects: Any) -> dict[str, Any]:
    """Returns the sections of the config that name classes and functions.

    Raises:
        UserError: one cannot be imported by its name.
    """
    sections: dict[str, Any] = {}
    for name, value in objects.items():
        reference = f"{value.__module__}:{getattr(value, '__qualname__', type(value).__qualname__)}"
        if value.__module__ == "__main__" or not reference.rpartition(":")[2].isidentifier():
            message = f"{reference} cannot be imported by the processes that compile"
            raise UserError(f"{name}: {message}; expected a class or function at the top of a module")
        sections[name] = {"type" if name == "model" else "function": reference}
    return sections
