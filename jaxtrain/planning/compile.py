"""Compiles a config's train step for absent devices in a child process, and reports its resources.

A child, since the environment of a target must be set before JAX starts, and JAX starts once in a process.
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

from pydantic import TypeAdapter

from jaxtrain.config.schema import Config
from jaxtrain.errors import UserError
from jaxtrain.hlo.collectives import Collective, count_collectives
from jaxtrain.io.system import exit_with_parent
from jaxtrain.planning.cost import memory
from jaxtrain.planning.cost.memory import Memory
from jaxtrain.planning.hardware import network, targets
from jaxtrain.planning.hardware.network import DevicePosition
from jaxtrain.planning.pods import Pod
from jaxtrain.sharding.axes import shape_text
from jaxtrain.sharding.layout import Layout

TIMEOUT = 1800.0  # seconds; the largest models compile in minutes
POLL = 0.05  # seconds


@dataclass(frozen=True)
class CompileReport:
    """Resources of one compiled step on a target.

    Args:
        sizes: of all mesh axes.
        collectives: of the step.
        state_bytes: bytes per device of each part of the train state.
        memory: bytes per device that the compiler plans.
        seconds: for tracing and compiling.
        weight_and_gradient_bytes: per device, see `step_program.weight_and_gradient_bytes`.
        tensors: largest tensors of the train state, with their bytes per device.
        positions: of the devices, in the order of the mesh.
        device_kind: JAX's name of the device.
        recomputes_logits: the loss recomputes its logits in the backward pass.
        vocab: rows of the decoder's embedding table.
        user_flops: of a step of a user's own model that counts them.
        cpu_rates: of CPU devices, see `hardware.simulated.measure_rates`.
        exchange: bytes that a device sends in exchanges of replicas that agree loosely, which are not in the step:
            the fields of `RoundBytes`.
        tree_bytes: bytes of trees that islands push or read, see `step_program.tree_bytes`.
        phases: of a run whose first steps send something else: (end, bytes that a device sends in a step).
        pod: smaller mesh for which the step was compiled; None if compiled for this one.
        text: of the compiled program; not in `as_dict`.
    """

    target: str
    layout: str
    sizes: dict[str, int]
    collectives: list[Collective]
    state_bytes: dict[str, int]
    memory: Memory
    seconds: float
    weight_and_gradient_bytes: dict[str, int] = field(default_factory=dict)
    tensors: list[tuple[str, int]] = field(default_factory=list)
    positions: list[DevicePosition] = field(default_factory=list)
    device_kind: str = ""
    recomputes_logits: bool = True
    vocab: int | None = None
    user_flops: float | None = None
    cpu_rates: dict[str, float] | None = None
    exchange: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)
    tree_bytes: dict[str, int] = field(default_factory=dict)
    phases: list[tuple[int, float]] = field(default_factory=list)
    pod: Layout | None = None
    text: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Converts the report for JSON."""
        return {**asdict(self), "text": ""}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], text: str) -> CompileReport:
        """Inverse of `as_dict` after JSON, with the program's text."""
        return TypeAdapter(cls).validate_python({**values, "text": text})


class CompileCrashed(RuntimeError):
    """The compiling process crashed, in its compiler or in the user's own model; a message of one line."""


class PodMismatch(RuntimeError):
    """The program of a smaller pod does not represent that of the full cluster; a message of one line."""


class CompileTimeout(UserError):
    """The step was not compiled in time."""


class StepTooLarge(UserError):
    """The step needs more memory than a device has. `needs`: bytes, None if the compiler does not report them."""

    def __init__(self, message: str, needs: int | None) -> None:
        super().__init__(message)
        self.needs = needs


def compile_report(
    config: Config, vocab: int | None, target: str, *, hlo: Path | None = None, timeout: float = TIMEOUT,
    pod: Pod | None = None,
) -> CompileReport:  # fmt: skip
    """Compiles a config's train step for devices, present or not, such as `h100:2x8`, `v5p:2x2x2` or `cpu:8`.

    Args:
        config: to compile.
        vocab: vocabulary size of the tokenizer; None for `model.vocab`, which a user's own model need not have.
        target: devices to compile for.
        hlo: file to which the text of the compiled program is written.
        timeout: seconds.
        pod: smaller config and target to compile instead, see `pods.smaller_pods`. The program and its memory besides
            the train state are the pod's, all else is that of the config on the target.

    Raises:
        UserError: an unknown target, a package that is not installed, or a layout that does not fit the target;
            StepTooLarge, CompileTimeout.
        PodMismatch: the pod's program does not represent that of the full cluster.
        CompileCrashed: the compiler or the model crashed.
    """
    return compile_reports(config, vocab, target, (pod,), hlo=hlo, timeout=timeout)[0]


def compile_reports(
    config: Config, vocab: int | None, target: str, pods: Sequence[Pod | None], *, hlo: Path | None = None,
    timeout: float = TIMEOUT,
) -> list[CompileReport]:  # fmt: skip
    """`compile_report` of several pods, compiled in parallel; `hlo` is of the first. No process outlives the call."""
    parsed, deadline = targets.parse(target), time.monotonic() + timeout
    problem = targets.missing_packages(parsed, config.step.attention) or dcn_problem(config.mesh.dcn, parsed)
    if problem:
        raise UserError(problem)
    request = {"config": config.model_dump(mode="json"), "vocab": vocab, "target": str(parsed), "parent": os.getpid()}
    with ExitStack() as stack:
        children = []
        for pod in pods:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            file = hlo if hlo and not children else folder / "step.hlo"
            small = {"config": pod.config.model_dump(mode="json"), "target": str(pod.target)} if pod else None
            child = _compile_process({**request, "hlo": str(file), "pod": small}, parsed, folder)
            children.append((stack.enter_context(child), folder, file))
        while any(process.poll() is None for process, *_ in children):
            if any(process.returncode for process, *_ in children):
                break  # a process failed
            if time.monotonic() >= deadline:
                raise CompileTimeout(f"target {parsed}: not compiled after {timeout:.0f} s")
            time.sleep(POLL)
        children.sort(key=lambda one: not one[0].returncode)  # raises the error of a failed process first
        return [
            CompileReport.from_dict(_read_answer(process.returncode, folder), file.read_text(encoding="utf-8"))
            for process, folder, file in children
        ]


def dcn_problem(dcn: Mapping[str, int], target: targets.Target) -> str | None:
    """Describes a mismatch of `mesh.dcn` and the slices of a target, in one line; None if they match."""
    spanned = prod(dcn.values())
    if target.slices in (1, spanned):
        return None
    expected = f"expected factors whose product is {target.slices}, such as mesh.dcn={{data: {target.slices}}}"
    return f"mesh.dcn: target {target} has {target.slices} slices, but the axes span {spanned}; {expected}"


@contextmanager
def _compile_process(request: Mapping[str, Any], target: targets.Target, folder: Path) -> Iterator[subprocess.Popen]:
    """Starts a process that compiles and writes `out` and `err` in the folder; kills it when the block ends."""
    path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))  # for a user's own model
    env = os.environ | {"PYTHONPATH": path} | targets.environment(target)
    (folder / "request").write_text(json.dumps(request), encoding="utf-8")
    command = [sys.executable, "-m", "jaxtrain.planning.compile"]
    with (folder / "request").open() as stdin, (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(command, stdin=stdin, stdout=out, stderr=err, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _read_answer(status: int, folder: Path) -> dict[str, Any]:
    """Reads a compiling process's answer from its exit status and output, and raises its errors."""
    texts = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    out, err = ([line.strip() for line in text.splitlines() if line.strip()] for text in texts)
    if status == -signal.SIGKILL:
        raise CompileCrashed("the compiling process was killed; this machine is probably out of memory")
    if status or not out:
        message = f": {err[-1][:300]}" if err else ""
        raise CompileCrashed(f"the compiling process exited with status {status}{message}")
    answer = json.loads(out[-1])
    if "error" in answer:
        errors = {"UserError": UserError, "StepTooLarge": StepTooLarge, "PodMismatch": PodMismatch}
        raise errors[answer["error"]](*answer["args"])
    return answer


def _compile(request: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles in the child process; returns the report, or an error as {"error": class, "args": arguments}."""
    from jaxtrain.core.batch_spec import example_row
    from jaxtrain.core.program import build_program
    from jaxtrain.data.dataset import declared_example, open_dataset
    from jaxtrain.models.spec import vocabulary_size
    from jaxtrain.planning import step_program

    start, target = time.perf_counter(), request["target"]
    try:
        config = Config(**request["config"])
        devices = targets.devices(target, config.step.attention)
        example = declared_example(config.data)
        data = None if config.data.is_text or example else open_dataset(config.data, config.seed)
        vocab = request["vocab"] or vocabulary_size(config.model, getattr(data, "vocab", None))
        example = example or example_row(config.data, data)
        program = build_program(config, vocab, devices, example)
        pod = _build_pod(request["pod"], vocab, program, target, example) if request["pod"] else None
        compiled = step_program.compile_step(pod or program, example)
    except PodMismatch as error:
        return {"error": "PodMismatch", "args": [str(error)]}
    except UserError as error:
        return {"error": "UserError", "args": [str(error)]}
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        line = str(error).strip().splitlines()[0][:300]
        message = f"target {target}: the step needs more memory than a device has: {line}"
        return {"error": "StepTooLarge", "args": [message, out_of_memory_bytes(str(error))]}
    seconds = time.perf_counter() - start
    rates = step_program.cpu_rates(devices, config.precision)
    kind = devices[0].device_kind
    try:
        report = report_program(program, compiled, target, kind, seconds=seconds, cpu_rates=rates, pod=pod)
    except ValueError as error:
        if pod is None:
            raise
        return {"error": "PodMismatch", "args": [str(error)]}
    Path(request["hlo"]).write_text(report.text, encoding="utf-8")
    return report.as_dict()


def _build_pod(request: Mapping[str, Any], vocab: int | None, program: Any, target: str, example: Any) -> Any:
    """Builds the program of a pod. Raises PodMismatch if its axes cross nodes or slices differently."""
    from jaxtrain.core.program import build_program
    from jaxtrain.planning import step_program

    config = Config(**request["config"])
    pod = build_program(config, vocab, targets.devices(request["target"], config.step.attention), example)
    crossing, expected = (
        network.axes_crossing_domains(step_program.device_positions(one, name), dict(one.layout.sizes))
        for one, name in ((pod, request["target"]), (program, target))
    )
    if crossing != expected:
        mesh = shape_text(pod.layout.sizes)
        raise PodMismatch(f"axes of mesh {mesh} on {request['target']} cross other nodes or slices than on {target}")
    return pod


def report_program(
    program: Any, compiled: Any, target: str, device_kind: str, *, seconds: float = 0.0,
    cpu_rates: dict[str, float] | None = None, pod: Any = None,
) -> CompileReport:  # fmt: skip
    """Reports a step that is compiled already, for example one that is also run.

    Args:
        program: `jaxtrain.core.program.Program`.
        compiled: `step_program.compile_step` of the program, or of the pod.
        target, device_kind, seconds, cpu_rates: as in `CompileReport`.
        pod: program of the smaller pod that was compiled.

    Raises:
        ValueError: collectives of the pod can not be expanded to the full mesh.
    """
    from jaxtrain.planning import step_program

    text, sizes, layout = compiled.as_text() or "", dict(program.layout.sizes), pod and pod.layout
    state, needs = memory.state_bytes(program.state), memory.compiled_memory(compiled)
    if pod is not None:
        needs = needs.add_state(sum(state.values()) - sum(memory.state_bytes(pod.state).values()))
    return CompileReport(
        target, str(program.layout), sizes,
        count_collectives(text, sizes, program.config.mesh.dcn, layout), state, needs, seconds,
        weight_and_gradient_bytes=step_program.weight_and_gradient_bytes(program),
        tensors=memory.largest_tensors(program.state),
        positions=step_program.device_positions(program, target), device_kind=device_kind,
        recomputes_logits=step_program.recomputes_logits(program), vocab=step_program.embedding_rows(program),
        user_flops=step_program.user_step_flops(program), cpu_rates=cpu_rates,
        exchange=step_program.exchange_bytes(program), tree_bytes=step_program.tree_bytes(program),
        phases=step_program.bytes_of_phases(program), pod=layout, text=text,
    )  # fmt: skip


def out_of_memory_bytes(message: str) -> int | None:
    """Bytes that a step needs, from a compiler's out-of-memory message; None if it has none."""
    units = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    match = re.search(r"(?:Used|Total hbm usage >=|temporaries \(|allocate) ?([\d.]+)\s?([BKMGT])", message)
    return round(float(match[1]) * units[match[2]]) if match else None


if __name__ == "__main__":
    request = json.load(sys.stdin)
    exit_with_parent(request["parent"])
    print(json.dumps(_compile(request)))
