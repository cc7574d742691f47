"""Compiles a config's train step for absent devices in a process of its own, and reports what it needs.

What a target wants must be set before JAX starts, and JAX starts once in a process: hence the child. No JAX here.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.config.schema import Config
from jaxtrain.plan import communication, memory, targets
from jaxtrain.plan.communication import Collective
from jaxtrain.plan.memory import Memory
from jaxtrain.plan.network import Place

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
        held: bytes per device besides the state, see `step.held_bytes`.
        tensors: the largest of the state, with their bytes per device.
        places: of the devices, in the order of the mesh.
        device_kind: as JAX names it.
        head_again: the loss computes its logits again in the backward pass.
        vocab: rows of the decoder's embedding table.
        user_flops: of a step of a user's own model, where it counts them.
        measured: rates of a CPU device, see `host.measure`.
        text: of the compiled program; not in `as_dict`.
    """

    target: str
    layout: str
    sizes: dict[str, int]
    rows: list[Collective]
    state: dict[str, int]
    memory: Memory
    seconds: float
    held: dict[str, int] = field(default_factory=dict)
    tensors: list[tuple[str, int]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    device_kind: str = ""
    head_again: bool = True
    vocab: int | None = None
    user_flops: float | None = None
    measured: dict[str, float] | None = None
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        places = [[place.domain, *place.coords, place.core] for place in self.places]
        return {**asdict(self), "rows": communication.as_dict(self.rows), "places": places, "text": ""}


class Crashed(RuntimeError):
    """The process that compiles broke down: its compiler, or the user's own model. In one line."""


class TimedOut(UserError):
    """The time to compile was up."""


class TooLarge(UserError):
    """A step that needs more memory than a device has. `needs`: bytes, None where the compiler does not say."""

    def __init__(self, message: str, needs: int | None) -> None:
        super().__init__(message)
        self.needs = needs


def measure(
    config: Config, vocab: int | None, target: str, *, hlo: Path | None = None, timeout: float = SECONDS
) -> Report:
    """The report of a config's real train step on absent devices such as `h100:2x8`, `v5p:2x2x2` or `cpu:8`.

    Args:
        vocab: of the tokenizer; None takes `model.vocab`, which a user's own model need not have.
        hlo: file to write the compiled program's text to.

    Raises:
        UserError: an unknown target, a package that is not installed, or a layout that does not fit the target;
            TooLarge for a step that needs more memory than the device has, TimedOut where the time is up.
        Crashed: the compiler or the model broke down.
    """
    where = targets.parse(target)
    if problem := targets.missing(where, config.step.attention):
        raise UserError(problem)
    if problem := across_slices(config, where):
        raise UserError(problem)
    with tempfile.TemporaryDirectory() as folder:
        file = hlo or Path(folder) / "step.hlo"
        asked = {"config": config.model_dump(mode="json"), "vocab": vocab, "target": str(where), "hlo": str(file)}
        answer = _ask(asked, where, timeout)
        return _report(answer, file.read_text(encoding="utf-8"))


def across_slices(config: Config, where: targets.Target) -> str | None:
    """What is wrong with a mesh for a target of slices: only `mesh.dcn` says which axes span them. In one line."""
    factors = config.mesh.dcn
    if where.slices == 1 or prod(factors.values()) == where.slices:
        return None
    expected = f"expected factors whose product is {where.slices}, such as mesh.dcn={{data: {where.slices}}}"
    return f"mesh.dcn: target {where} has {where.slices} slices, and the axes span {prod(factors.values())}; {expected}"


def _ask(asked: Mapping[str, Any], where: targets.Target, timeout: float) -> dict[str, Any]:
    """The answer of the process that compiles."""
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # a user's own model is found
    env = os.environ | {"PYTHONPATH": path} | targets.environment(where)
    command = [sys.executable, "-m", "jaxtrain.plan.compile"]
    try:
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, env=env, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise TimedOut(f"target {where}: not compiled after {timeout:.0f} s") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        ended = f"ended with status {done.returncode}{f': {said[-1][:300]}' if said else ''}"
        killed = "was killed, as a system does that has no memory left: of this machine, not of the target"
        raise Crashed(f"compiling {killed if done.returncode == -signal.SIGKILL else ended}")
    answer = json.loads(lines[-1])
    if "needs" in answer:
        raise TooLarge(answer["error"], answer["needs"])
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _report(answer: Mapping[str, Any], text: str) -> Report:
    return Report(**{
        **answer, "rows": communication.from_dict(answer["rows"]), "memory": Memory(**answer["memory"]), "text": text,
        "places": [Place(domain, tuple(coords), core) for domain, *coords, core in answer["places"]],
        "tensors": [(name, size) for name, size in answer["tensors"]],
    })  # fmt: skip


def _child(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The report, in the process that compiles; a problem of the user's as {"error": line}."""
    from jaxtrain.data.dataset import open_dataset
    from jaxtrain.models.tensors import vocabulary
    from jaxtrain.plan import step
    from jaxtrain.train.program import build

    start = time.perf_counter()
    try:
        config = Config(**asked["config"])
        devices = targets.devices(asked["target"], attention=config.step.attention)
        # The shapes of a user's own data are those of a row of theirs.
        data = None if config.data.type == "text" else open_dataset(config.data, config.seed)
        vocab = asked["vocab"] or vocabulary(config, getattr(data, "vocab", None))
        program = build(config, vocab, devices)
        compiled = step.compiled_step(program, None if data is None else data.batch(0, slice(0, 1)))
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = f"target {asked['target']}: the step needs more memory than a device has: {_line(error)}"
        return {"error": message, "needs": needed(str(error))}
    seconds = time.perf_counter() - start
    measured = step.measured(devices, config.precision)
    kind = devices[0].device_kind
    report = of_program(program, compiled, asked["target"], kind, seconds=seconds, measured=measured)
    Path(asked["hlo"]).write_text(report.text, encoding="utf-8")
    return report.as_dict()


def of_program(
    program: Any, compiled: Any, target: str, device_kind: str, *, seconds: float = 0.0,
    measured: dict[str, float] | None = None,
) -> Report:  # fmt: skip
    """The report of a step that is compiled already, e.g. to predict one that is to be run as well.

    Args:
        program: `jaxtrain.train.program.Program`.
        compiled: `step.compiled_step(program)`.
        device_kind, seconds, measured: as in `Report`.
    """
    from jaxtrain.plan import step

    text, sizes = compiled.as_text() or "", dict(program.layout.sizes)
    return Report(
        target, str(program.layout), sizes, communication.report(text, sizes, program.config.mesh.dcn),
        memory.state_bytes(program.state), memory.compiled_memory(compiled), seconds,
        step.held_bytes(program), memory.largest(program.state), step.places(program, target),
        device_kind, step.head_again(program), step.vocabulary(program), step.counted_by_model(program), measured, text,
    )  # fmt: skip


def needed(message: str) -> int | None:
    """Bytes that a step needs, from what a compiler says when it runs out of memory; None where it does not say."""
    units = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    found = re.search(r"(?:Used|Total hbm usage >=|temporaries \(|allocate) ?([\d.]+)\s?([BKMGT])", message)
    return round(float(found[1]) * units[found[2]]) if found else None


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


if __name__ == "__main__":
    print(json.dumps(_child(json.load(sys.stdin))))
