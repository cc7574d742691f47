"""Plan of a step: memory, communication, time, and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from jaxtrain.io.figure import Displayed


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same mesh axes, or copies to or from the host, in one step of a device.

    Args:
        axes: mesh axes joined by `+`; `host` for copies to and from the host.
        op: operation.
        network: that it uses, e.g. `NVLink`, `ICI`, `NVLink+InfiniBand`, `PCIe`.
        count: runs.
        bytes: bytes that a device sends.
        seconds: on the network; None if unknown.
        hidden: seconds that overlap with computation.
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
        """Seconds for which the device waits."""
        return max(0.0, (self.seconds or 0.0) - (self.hidden or 0.0))


@dataclass(frozen=True)
class Advice:
    """A change to the config or the environment, and its estimated gain.

    Args:
        change: as typed, e.g. `step.remat=dots`.
        gain: relative rise of tokens/s; 0 if the change is about memory.
        why: in a sentence, with figures.
    """

    change: str
    gain: float
    why: str


@dataclass(frozen=True)
class PricedStrategy:
    """Bytes and times of islands with one strategy. Seconds are None if the rate of the link or the step is unknown.

    Args:
        name: such as `ssp` or `diloco, every 64`.
        keys: of the config that select it, as typed.
        every: steps from one exchange to the next.
        sent, received: bytes of an island in an exchange.
        sent_a_step, received_a_step: their means over steps.
        server_bytes: in an exchange of all islands, both ways through the link of a server.
        exchange_seconds: for which an island waits in an exchange.
        wait_seconds: for which it waits in a step, in the mean.
        step_seconds: of a step with its wait.
        wait_share: part of that which is the wait.
        tokens_per_second: of all islands.
    """

    name: str
    keys: str
    every: int
    sent: int
    received: int
    sent_a_step: float
    received_a_step: float
    server_bytes: float
    exchange_seconds: float | None = None
    wait_seconds: float | None = None
    step_seconds: float | None = None
    wait_share: float | None = None
    tokens_per_second: float | None = None


@dataclass(frozen=True)
class IslandsPlan:
    """Exchanges of islands with their servers, see `planning.islands`.

    Args:
        count, servers: as in the config.
        link: its name or rate, as given.
        rate: bytes/s of an island's link, one way; None if unknown.
        own: the strategy of the config.
        choices: strategies to choose from, the least loose one first.
        chosen: keys of the one to choose; empty if the times are unknown.
        why: in a line.
        server_link: of a server, as given; empty: as an island's.
        server_rate: bytes/s of that, one way; None: as an island's.
    """

    count: int
    servers: int
    link: str
    rate: float | None
    own: PricedStrategy
    choices: tuple[PricedStrategy, ...]
    chosen: str
    why: str
    server_link: str = ""
    server_rate: float | None = None


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Prediction of one step of a config on a target. Bytes, FLOPs and seconds are of one device and one step.

    The plan of islands is that of one island; its steps are as long as the strategy of the config makes them.

    Args:
        target: as `targets.parse` takes it.
        device: JAX's name of the chip, or its kind.
        devices: number of devices.
        layout: its name and mesh.
        sizes: of all mesh axes.
        fits: None if the memory of the device is unknown or the step was not compiled.
        compiled: the compiler finished: it compiled the step, or found that it does not fit.
        reason: why it does not fit or was not compiled; else empty.
        needs: bytes of memory; 0 if the compiler does not report them.
        usable: bytes that a program may allocate.
        crosses: mesh axis larger than one -> whether it leaves a node or slice.
        memory: bytes by kind: `params`, `gradients`, `optimizer`, `sync` (state that the strategy of `sync` adds),
            `gathered` (weights), `activations` (and other temporaries), `workspace` (of kernels, which the compiler
            does not count), `batch`; and `host`, of the host.
        tensors: largest of the train state, (path, bytes).
        buffers: largest that the step allocates, (shape, scope, bytes).
        traffic: by axes and operation, longest first.
        flops_model, flops_hardware: by `jaxtrain.models.flops`; None for a model without a count.
        flops_compiled: of the compiled program.
        compute_seconds: None if the chip is unknown.
        exposed_seconds: of communication that does not overlap, the pipeline's included.
        bubble_seconds: for which pipeline stages wait for one another.
        seconds_by: compute seconds by (`phase`, `part` and `kind`) of `jaxtrain.planning.cost.roofline`.
        flops_by, bytes_by: FLOPs, and bytes of device memory read and written, by the same.
        step_seconds, tokens_per_second, mfu, hfu: predictions; rates are of all devices.
        tokens: of a global batch; of the rows of one island.
        steps: of the run.
        bottleneck: largest part of the step time, in a sentence.
        advice: the most useful changes.
        notes: assumptions of this plan.
        pods: smaller pods that were compiled and from which this plan is extrapolated; else empty.
        compile_seconds: for tracing and compiling.
        tree_bytes: of whole trees, of all devices together: `gradients`, `params`, and `mutable` variables; in few
            bits as `gradients int8`, see `step_program.tree_bytes`.
        replica_rate: bytes/s at which a replica sends to the others, all its devices together; None if unknown, or if
            there is one replica.
        islands: what islands and their server send each other; None: there are none.
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
    bottleneck: str = ""
    advice: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    tree_bytes: dict[str, int] = field(default_factory=dict)
    replica_rate: float | None = None
    islands: IslandsPlan | None = None

    @property
    def can_run(self) -> bool:
        """True if the step compiles and is not known to exceed the memory; else there are no figures of a step."""
        return self.compiled and self.fits is not False

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all devices."""
        return self.tokens / self.step_seconds if self.step_seconds else None

    @property
    def days(self) -> float | None:
        """Days of the run of `config.steps` steps."""
        return self.steps * self.step_seconds / 86400 if self.step_seconds else None

    @property
    def device_hours(self) -> float | None:
        """Device-hours of the run."""
        return None if self.days is None else self.days * 24 * self.devices

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step."""
        return sum(row.bytes for row in self.traffic)

    def as_dict(self) -> dict[str, Any]:
        """Converts the plan for JSON, with derived figures."""
        derived = ("tokens_per_second", "days", "device_hours", "wire_bytes")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Inverse of `as_dict`, also after JSON. Raises ValueError for other values."""
        return TypeAdapter(cls).validate_python(
            {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        )
