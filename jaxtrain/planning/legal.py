"""Ways to share devices out over mesh axes, and what is wrong with a config on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxtrain.config.checks import cross_problems, divisors
from jaxtrain.config.schema import Config
from jaxtrain.models.layout_check import check_config
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.rules import CONTEXT


def problems(config: Config, devices: int, vocab: int | None = None) -> list[str]:
    """Returns the problems of a config on a number of devices, as a run finds them before JAX starts."""
    found = [*check_config(config, devices, vocab), *check_pipeline(config, devices)]
    return [*(found.message for found in cross_problems(config)), *map(str, found)]


def factorisations(axes: Sequence[str], devices: int) -> Iterator[dict[str, int]]:
    """Every way to write `devices` as a product of sizes of these axes."""
    if not axes:
        if devices == 1:
            yield {}
        return
    for size in divisors(devices, devices, count=devices):
        for rest in factorisations(axes[1:], devices // size):
            yield {axes[0]: size, **rest}


def effect(config: Config) -> str:
    """Returns a canonical form of what a layout does on its mesh: two layouts with the same effect are one."""
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    rules = {name: [a for a in axes if sizes.get(a, 1) > 1] for name, axes in sorted(config.rules.items())}
    rules = {name: axes for name, axes in rules.items() if axes}
    zero = config.zero if sizes["data"] > 1 else 0
    context = config.context_parallel if CONTEXT in rules else "auto"
    return f"{[(a, n) for a, n in sizes.items() if n > 1]} {rules} {zero} {context} {config.step.microbatches}"
