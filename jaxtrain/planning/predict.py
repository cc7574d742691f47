"""Prediction of a `Plan` for a config on a target, compiled in child processes, as it is or in smaller pods."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.planning import advice, compile, pods
from jaxtrain.planning.assess import assess, tokens_of
from jaxtrain.planning.extrapolate import extrapolated
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.pods import Pod
from jaxtrain.planning.result import Plan
from jaxtrain.sharding.layout import resolve_layout


def predict(
    config: Config, vocab: int | None, target: str, *, slices: int | None = None, hlo: Path | None = None,
    timeout: float = compile.SECONDS, largest: int | None = pods.LARGEST,
) -> Plan:  # fmt: skip
    """The plan of a config's real train step on devices that need not be there.

    A step that needs more memory than a device has is a plan that does not fit; one that the compiler or the model's
    own code breaks down on is a plan that was not compiled. Both have the reason.

    Args:
        vocab: of the tokenizer; None takes `model.vocab`.
        target: as `targets.parse` takes it.
        slices: of TPUs.
        hlo: file to write the compiled program's text to; of smaller pods, the larger one's.
        timeout: seconds to compile in.
        largest: number of devices above which smaller pods are compiled instead, where these can tell (`pods.pods`);
            None: never.

    Raises:
        UserError: an unknown target, a package that is not installed, or a layout that does not fit.
    """
    where, deadline = targets.parse(target, slices), time.monotonic() + timeout
    found, notes = () if largest is None else pods.pods(config, where, largest), ()
    try:
        if found:
            return _of_pods(config, vocab, where, found, hlo, timeout)
    except (compile.Unlike, compile.TooLarge, compile.Crashed) as error:
        if isinstance(error, compile.TooLarge) and len(found) == 1:  # as the whole is: its shards are no larger
            refused = _refused(config, where, fits=False, reason=str(error), needs=error.needs or 0)
            return replace(refused, pods=tuple(map(str, found)))
        notes = (f"no smaller pod tells it, so that it was compiled as it is: {error}",)
    try:
        report = compile.measure(config, vocab, str(where), hlo=hlo, timeout=max(1.0, deadline - time.monotonic()))
    except compile.TooLarge as error:
        return _refused(config, where, fits=False, reason=str(error), needs=error.needs or 0)
    except compile.Crashed as error:
        return _refused(config, where, fits=None, compiled=False, reason=str(error))
    plan = assess(config, report)
    return replace(plan, notes=(*plan.notes, *notes))


def _of_pods(
    config: Config, vocab: int | None, where: targets.Target, found: Sequence[Pod], hlo: Path | None, timeout: float
) -> Plan:
    """The plan that one or two smaller pods tell, compiled side by side."""
    reports = compile.together(config, vocab, str(where), found, hlo=hlo, timeout=timeout)
    plans = [assess(config, report) for report in reports]
    plan = plans[0] if len(plans) == 1 else extrapolated(config, *plans, shards=pods.shards(*found))
    return replace(plan, pods=tuple(map(str, found)))


def _refused(config: Config, where: targets.Target, **said: Any) -> Plan:
    """The plan of a step that is not to be had."""
    count = where.devices or 0
    layout = resolve_layout(config.layout, config.mesh, config.rules, count) if count else None
    plan = Plan(
        str(where), where.kind, count, str(layout or config.layout), dict(layout.sizes) if layout else {},
        usable=int(where.chip.usable.value) if where.chip else None,
        tokens=tokens_of(config), steps=config.steps, **said,
    )  # fmt: skip
    return replace(plan, limit=advice.limit(plan), advice=tuple(advice.changes(config, plan)) if layout else ())
