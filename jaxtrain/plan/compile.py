"""Compiles a config's train step for absent devices in a process of its own, and reports what it needs.

What a target wants must be set before JAX starts, and JAX starts once in a process: hence the child. No JAX here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.config.schema import Config
from jaxtrain.plan import communication, memory, targets
from jaxtrain.plan.communication import Collective
from jaxtrain.plan.memory import Memory

SECONDS = 1800.0  # the largest models compile in minutes


@dataclass(frozen=True)
class Report:
    """What one step needs on a target.

    Args:
        sizes: of all mesh axes.
        rows: collectives.
        state: bytes per device of each part of the state.
        memory: bytes per device that the compiler plans.
        seconds: that tracing and compiling took.
    """

    target: str
    layout: str
    sizes: dict[str, int]
    rows: list[Collective]
    state: dict[str, int]
    memory: Memory
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "rows": communication.as_dict(self.rows)}


def measure(
    config: Config, vocab: int | None, target: str, *, hlo: Path | None = None, timeout: float = SECONDS
) -> Report:
    """The report of a config's real train step on absent devices such as `h100:2x8`, `v5p:2x2x2` or `cpu:8`.

    Args:
        vocab: of the tokenizer; None takes `model.vocab`, which a user's own model need not have.
        hlo: file to write the compiled program's text to.

    Raises:
        UserError: an unknown target, a package that is not installed, a layout that does not fit, or a step that
            cannot be compiled for the target (such as one that needs more memory than the device has).
    """
    where = targets.parse(target)
    if problem := targets.missing(where, config.step.attention):
        raise UserError(problem)
    asked = {"config": config.model_dump(mode="json"), "vocab": vocab, "target": str(where), "hlo": hlo and str(hlo)}
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # a user's own model is found
    env = os.environ | {"PYTHONPATH": path} | targets.environment(where)
    command = [sys.executable, "-m", "jaxtrain.plan.compile"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, env=env, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"target {where}: not compiled after {timeout:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"target {where}: compiling ended with status {done.returncode}\n" + "\n".join(said[-30:]))
    answer = json.loads(lines[-1])
    if "error" in answer:
        raise UserError(answer["error"])
    return _report(answer)


def _report(answer: Mapping[str, Any]) -> Report:
    return Report(**{
        **answer, "rows": communication.from_dict(answer["rows"]), "memory": Memory(**answer["memory"]),
    })  # fmt: skip


def _child(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The report, in the process that compiles; a problem of the user's as {"error": line}."""
    from jaxtrain.plan.step import compiled_step
    from jaxtrain.train.program import build

    start = time.perf_counter()
    try:
        config = Config(**asked["config"])
        devices = targets.devices(asked["target"], attention=config.step.attention)
        program = build(config, asked["vocab"] or config.model.vocab, devices)
        compiled = compiled_step(program)
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"error": f"target {asked['target']}: the step needs more memory than a device has: {_line(error)}"}
    text = compiled.as_text() or ""
    if asked["hlo"]:
        Path(asked["hlo"]).write_text(text, encoding="utf-8")
    sizes = dict(program.layout.sizes)
    return Report(
        asked["target"], str(program.layout), sizes, communication.report(text, sizes),
        memory.state_bytes(program.state), memory.compiled_memory(compiled), time.perf_counter() - start,
    ).as_dict()  # fmt: skip


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


if __name__ == "__main__":
    print(json.dumps(_child(json.load(sys.stdin))))
