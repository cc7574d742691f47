"""Plan of a step: if it fits, what it sends, how long it takes, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, or copies to or from the host, in one step of a device.

    Args:
        axes: mesh axes joined by `+`.
        network: that carries them, e.g. `NVLink`, `ICI`, `NVLink+InfiniBand`, `PCIe`.
        bytes: that a device sends.
        seconds: on the network; None where nobody knows it.
        hidden: seconds of these that pass while the device computes.
    """

    axes: str
    op: str
    network: str
    count: int
    bytes: int
    seconds: float | None
    hidden: float | None

    @property
    def exposed(self) -> float:
        """Seconds in which the device waits."""
        return max(0.0, (self.seconds or 0.0) - (self.hidden or 0.0))


@dataclass(frozen=True)
class Advice:
    """A change to the config or the environment, and what it would gain.

    Args:
        change: as it would be written, e.g. `step.remat=dots`.
        gain: share by which tokens/s would rise; 0 where it is about memory.
        why: in a sentence, with its figures.
    """

    change: str
    gain: float
    why: str


@dataclass(frozen=True)
class Plan:
    """One step of a config on a target, predicted. Bytes, FLOPs and seconds are of one device and one step.

    Args:
        target: as `targets.parse` takes it.
        device: JAX's name of the chip, or its kind.
        devices: number of them.
        layout: its name and mesh.
        sizes: of all mesh axes.
        crosses: of the mesh axes larger than one, whether they leave a node or slice.
        fits: None where the memory of the device is not known, or the step was not compiled.
        compiled: the compiler came to an end: it made the step, or found that it does not fit.
        reason: why it does not fit, or was not compiled; else empty.
        needs: bytes; 0 where the compiler does not say.
        usable: bytes that a program may take.
        memory: bytes by kind: `params`, `gradients`, `optimizer`, `gathered` (weights), `activations` (and other
            temporaries), `workspace` (of kernels, where the compiler leaves it to the GPU), `batch`; and `host`, which
            is not the device's.
        tensors: the largest of the train state, (path, bytes).
        buffers: the largest that the step makes, (shape, scope, bytes).
        traffic: by axes and operation, longest first; the axes of copies to and from the host are `host`.
        flops_model, flops_hardware: by `jaxtrain.models.flops`; None of a model that nobody counts.
        flops_compiled: of the compiled program.
        compute_seconds: None where nobody knows the chip.
        exposed_seconds: of communication, the pipeline's included.
        bubble_seconds: that pipeline stages wait for one another.
        seconds_by: compute seconds by (`phase`, `part` and `kind`) of `jaxtrain.planning.cost.roofline`.
        flops_by, bytes_by: FLOPs, and bytes read and written of the device's memory, by the same.
        step_seconds, tokens_per_second, mfu, hfu: predicted; rates are of all devices.
        tokens: of a global batch.
        steps: of the run.
        limit: what takes most of the step, in a sentence.
        advice: the changes that would help most.
        notes: assumptions that bear on this plan.
        pods: the smaller ones that were compiled instead, and from which this plan is extrapolated; else empty.
        compile_seconds: that tracing and compiling took.
    """

    target: str
    device: str
    devices: int
    layout: str
    sizes: dict[str, int]
    fits: bool | None
    compiled: bool = True
    reason: str = ""
    needs: int = 0
    usable: int | None = None
    crosses: dict[str, bool] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    tensors: tuple[tuple[str, int], ...] = ()
    buffers: tuple[tuple[str, str, int], ...] = ()
    traffic: tuple[Traffic, ...] = ()
    flops_model: float | None = None
    flops_hardware: float | None = None
    flops_compiled: float | None = None
    compute_seconds: float | None = None
    exposed_seconds: float | None = None
    bubble_seconds: float = 0.0
    seconds_by: dict[str, dict[str, float]] = field(default_factory=dict)
    flops_by: dict[str, dict[str, float]] = field(default_factory=dict)
    bytes_by: dict[str, dict[str, float]] = field(default_factory=dict)
    step_seconds: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    tokens: int = 0
    steps: int = 0
    limit: str = ""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    compile_seconds: float = 0.0

    @property
    def can_run(self) -> bool:
        """True if the step can run, as far as is known; else there are no figures of a step."""
        return self.compiled and self.fits is not False

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def days(self) -> float | None:
        """Days of the whole run, `config.steps` steps."""
        return self.steps * self.step_seconds / 86400 if self.step_seconds else None

    @property
    def device_hours(self) -> float | None:
        """Device-hours of the whole run."""
        return None if self.days is None else self.days * 24 * self.devices

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(row.bytes for row in self.traffic)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan for JSON, with derived figures."""
        derived = ("tokens_per_second", "days", "device_hours", "wire_bytes")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The inverse of `as_dict`, also after JSON."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        return cls(**{
            **known,
            "tensors": tuple((name, size) for name, size in known.get("tensors", ())),
            "buffers": tuple((shape, scope, size) for shape, scope, size in known.get("buffers", ())),
            "traffic": tuple(Traffic(**row) for row in known.get("traffic", ())),
            "advice": tuple(Advice(**row) for row in known.get("advice", ())),
            "notes": tuple(known.get("notes", ())), "pods": tuple(known.get("pods", ())),
        })  # fmt: skip
