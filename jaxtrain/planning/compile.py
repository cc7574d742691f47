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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.hlo import collectives
from jaxtrain.hlo.collectives import Collective
from jaxtrain.io.system import exit_with_parent
from jaxtrain.planning.cost import memory
from jaxtrain.planning.cost.memory import Memory
from jaxtrain.planning.hardware import network, targets
from jaxtrain.planning.hardware.network import DevicePosition
from jaxtrain.planning.pods import Pod
from jaxtrain.sharding.axes import shape_text
from jaxtrain.sharding.layout import Layout

SECONDS = 1800.0  # the largest models compile in minutes
POLL = 0.05  # seconds


@dataclass(frozen=True)
class Report:
    """Resources that one step needs on a target.

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
        pod: the smaller mesh that the step was compiled for; None where it was compiled for this one.
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
    places: list[DevicePosition] = field(default_factory=list)
    device_kind: str = ""
    head_again: bool = True
    vocab: int | None = None
    user_flops: float | None = None
    measured: dict[str, float] | None = None
    pod: Layout | None = None
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for JSON."""
        places = [[place.domain, *place.coords, place.core] for place in self.places]
        return {**asdict(self), "rows": collectives.as_dict(self.rows), "places": places, "text": ""}


class Crashed(RuntimeError):
    """The process that compiles broke down: its compiler, or the user's own model. In one line."""


class Unlike(RuntimeError):
    """A smaller pod whose program does not tell that of the whole. Why, in one line."""


class TimedOut(UserError):
    """The time to compile was up."""


class TooLarge(UserError):
    """A step that needs more memory than a device has. `needs`: bytes, None where the compiler does not say."""

    def __init__(self, message: str, needs: int | None) -> None:
        super().__init__(message)
        self.needs = needs


def measure(
    config: Config, vocab: int | None, target: str, *, hlo: Path | None = None, timeout: float = SECONDS,
    pod: Pod | None = None,
) -> Report:  # fmt: skip
    """The report of a config's real train step on absent devices such as `h100:2x8`, `v5p:2x2x2` or `cpu:8`.

    Args:
        vocab: of the tokenizer; None takes `model.vocab`, which a user's own model need not have.
        hlo: file to write the compiled program's text to.
        pod: to compile for instead, see `pods.pods`: the program, and the memory it takes besides the state, are its,
            all else is that of the config on the target.

    Raises:
        UserError: an unknown target, a package that is not installed, or a layout that does not fit the target;
            TooLarge for a step that needs more memory than the device has, TimedOut where the time is up.
        Unlike: the pod's program would not be that of the whole.
        Crashed: the compiler or the model broke down.
    """
    return together(config, vocab, target, (pod,), hlo=hlo, timeout=timeout)[0]


def together(
    config: Config, vocab: int | None, target: str, pods: Sequence[Pod | None], *, hlo: Path | None = None,
    timeout: float = SECONDS,
) -> list[Report]:  # fmt: skip
    """`measure` of several pods, compiled side by side; `hlo` is of the first. No process outlives the call."""
    where, deadline = targets.parse(target), time.monotonic() + timeout
    if problem := targets.missing(where, config.step.attention):
        raise UserError(problem)
    if problem := across_slices(config, where):
        raise UserError(problem)
    asked = {"config": config.model_dump(mode="json"), "vocab": vocab, "target": str(where), "parent": os.getpid()}
    with ExitStack() as stack:
        started = []
        for pod in pods:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            file = hlo if hlo and not started else folder / "step.hlo"
            small = {"config": pod.config.model_dump(mode="json"), "target": str(pod.target)} if pod else None
            process = stack.enter_context(_running({**asked, "hlo": str(file), "pod": small}, where, folder))
            started.append((process, folder, file))
        while any(process.poll() is None for process, *_ in started):
            if any(process.returncode for process, *_ in started):
                break  # one broke down
            if time.monotonic() >= deadline:
                raise TimedOut(f"target {where}: not compiled after {timeout:.0f} s")
            time.sleep(POLL)
        started.sort(key=lambda one: not one[0].returncode)  # stable: what broke down says so first
        return [_report(_answer(p.returncode, folder), file.read_text(encoding="utf-8")) for p, folder, file in started]


def across_slices(config: Config, where: targets.Target) -> str | None:
    """Returns the problem of a mesh on a target of slices: only `mesh.dcn` says which axes span them. In one line."""
    factors = config.mesh.dcn
    if where.slices == 1 or prod(factors.values()) == where.slices:
        return None
    expected = f"expected factors whose product is {where.slices}, such as mesh.dcn={{data: {where.slices}}}"
    return f"mesh.dcn: target {where} has {where.slices} slices, and the axes span {prod(factors.values())}; {expected}"


@contextmanager
def _running(asked: Mapping[str, Any], where: targets.Target, folder: Path) -> Iterator[subprocess.Popen]:
    """The process that compiles: it writes `out` and `err` in the folder, and is ended with the block."""
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # a user's own model is found
    env = os.environ | {"PYTHONPATH": path} | targets.environment(where)
    (folder / "asked").write_text(json.dumps(asked), encoding="utf-8")
    with (folder / "asked").open() as asks, (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain.planning.compile"], stdin=asks, stdout=out, stderr=err, env=env
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _answer(status: int, folder: Path) -> dict[str, Any]:
    """Reads the answer of a compiling process from its exit status and output."""
    texts = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    out, err = ([line.strip() for line in text.splitlines() if line.strip()] for text in texts)
    if status or not out:
        ended = f"ended with status {status}{f': {err[-1][:300]}' if err else ''}"
        killed = "was killed, as a system does that has no memory left: of this machine, not of the target"
        raise Crashed(f"compiling {killed if status == -signal.SIGKILL else ended}")
    answer = json.loads(out[-1])
    if "unlike" in answer:
        raise Unlike(answer["unlike"])
    if "needs" in answer:
        raise TooLarge(answer["error"], answer["needs"])
    if "error" in answer:
        raise UserError(answer["error"])
    return answer


def _report(answer: Mapping[str, Any], text: str) -> Report:
    return Report(**{
        **answer, "rows": collectives.from_dict(answer["rows"]), "memory": Memory(**answer["memory"]), "text": text,
        "places": [DevicePosition(domain, tuple(coords), core) for domain, *coords, core in answer["places"]],
        "tensors": [(name, size) for name, size in answer["tensors"]],
        "pod": Layout(**answer["pod"]) if answer["pod"] else None,
    })  # fmt: skip


def _child(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The report, in the process that compiles; a problem of the user's as {"error": line}."""
    from jaxtrain.core.program import build_program
    from jaxtrain.data.dataset import open_dataset
    from jaxtrain.models.spec import vocabulary_size
    from jaxtrain.planning import step_program

    start = time.perf_counter()
    try:
        config = Config(**asked["config"])
        devices = targets.devices(asked["target"], attention=config.step.attention)
        # The shapes of a user's own data are those of a row of theirs.
        data = None if config.data.is_text else open_dataset(config.data, config.seed)
        vocab = asked["vocab"] or vocabulary_size(config.model, getattr(data, "vocab", None))
        program = build_program(config, vocab, devices)
        pod = _pod(asked["pod"], vocab, program, asked["target"]) if asked["pod"] else None
        compiled = step_program.compiled_step(pod or program, None if data is None else data.batch(0, slice(0, 1)))
    except Unlike as error:
        return {"unlike": str(error)}
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        message = f"target {asked['target']}: the step needs more memory than a device has: {_line(error)}"
        return {"error": message, "needs": needed(str(error))}
    seconds = time.perf_counter() - start
    measured = step_program.measured(devices, config.precision)
    kind = devices[0].device_kind
    try:
        report = of_program(program, compiled, asked["target"], kind, seconds=seconds, measured=measured, pod=pod)
    except ValueError as error:
        if pod is None:
            raise
        return {"unlike": str(error)}
    Path(asked["hlo"]).write_text(report.text, encoding="utf-8")
    return report.as_dict()


def _pod(asked: Mapping[str, Any], vocab: int | None, whole: Any, target: str) -> Any:
    """The program of a pod. Raises Unlike where it would not be that of the whole."""
    from jaxtrain.core.program import build_program
    from jaxtrain.planning import step_program

    config = Config(**asked["config"])
    pod = build_program(config, vocab, targets.devices(asked["target"], attention=config.step.attention))
    found, wanted = (
        network.crosses(step_program.places(program, on), dict(program.layout.sizes))
        for program, on in ((pod, asked["target"]), (whole, target))
    )
    if found != wanted:
        raise Unlike(f"mesh {shape_text(pod.layout.sizes)} does not lie across {asked['target']} as the whole does")
    return pod


def of_program(
    program: Any, compiled: Any, target: str, device_kind: str, *, seconds: float = 0.0,
    measured: dict[str, float] | None = None, pod: Any = None,
) -> Report:  # fmt: skip
    """The report of a step that is compiled already, e.g. to predict one that is to be run as well.

    Args:
        program: `jaxtrain.core.program.Program`.
        compiled: `step.compiled_step(program)`, or of the pod.
        device_kind, seconds, measured: as in `Report`.
        pod: the program of a smaller pod, which was compiled.

    Raises:
        ValueError: the pod's collectives do not tell those of the whole.
    """
    from jaxtrain.planning import step_program

    text, sizes, layout = compiled.as_text() or "", dict(program.layout.sizes), pod and pod.layout
    state, needs = memory.state_bytes(program.state), memory.compiled_memory(compiled)
    if pod is not None:
        needs = needs.with_state(sum(state.values()) - sum(memory.state_bytes(pod.state).values()))
    return Report(
        target, str(program.layout), sizes, collectives.report(text, sizes, program.config.mesh.dcn, layout),
        state, needs, seconds, step_program.held_bytes(program), memory.largest(program.state),
        step_program.places(program, target),
        device_kind, step_program.head_again(program), step_program.vocabulary(program),
        step_program.counted_by_model(program), measured, layout, text,
    )  # fmt: skip


def needed(message: str) -> int | None:
    """Bytes that a step needs, from what a compiler says when it runs out of memory; None where it does not say."""
    units = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    found = re.search(r"(?:Used|Total hbm usage >=|temporaries \(|allocate) ?([\d.]+)\s?([BKMGT])", message)
    return round(float(found[1]) * units[found[2]]) if found else None


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    exit_with_parent(asked["parent"])
    print(json.dumps(_child(asked)))
