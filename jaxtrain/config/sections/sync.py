"""Section `sync` of the config: when replicas agree, and what they send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer, model_validator

from jaxtrain.config.field_types import (
    Bool,
    Count,
    Fraction,
    NonNegative,
    NonZeroFraction,
    PositiveFloat,
    PositiveInt,
    Share,
)
from jaxtrain.config.section import Section, key, section
from jaxtrain.config.sections.islands import STALE

STRATEGY_KEYS: dict[str, tuple[str, ...]] = {  # keys of `sync` that each built-in strategy reads
    "bsp": ("compress",), "local_sgd": ("every",), "post_local": ("every", "bsp_steps"),
    "diloco": ("every", "outer", "compress"), "streaming_diloco": ("every", "outer", "compress", "streaming"),
    "muloco": ("every", "outer", "compress"), "async_diloco": ("every", "outer", "compress"),
    "gossip": ("every", "gossip"), "ssp": ("stale", "compress"), "asp": ("stale", "compress"),
}  # fmt: skip
AT_OUTER = ("diloco", "streaming_diloco", "muloco", "async_diloco")  # those whose result is that of an outer optimizer


def exchange_axis(sizes: Mapping[str, int | None]) -> str:
    """Returns the mesh axis along which compressed values travel: `replica`, or with a single replica `data`.

    Args:
        sizes: of the mesh axes; one that is missing has 1, and one that is not known yet (-1, None) counts as several.
    """
    return "replica" if sizes.get("replica", 1) != 1 or sizes.get("data", 1) == 1 else "data"


class OuterConfig(Section):
    """Outer optimizer of diloco: SGD on the average change of the replicas."""

    lr: PositiveFloat = key(0.7, "outer learning rate; 1 without momentum copies the average")
    momentum: Share = key(0.9, "outer momentum")
    nesterov: Bool = key(True, "Nesterov's momentum, as of torch.optim.SGD(nesterov=True)")


FIRST_SHARE = 0.25  # of the values, with which the warm-up of topk begins
GRADIENT_KEYS: dict[str, tuple[str, ...]] = {  # keys of `sync.compress` that only some compressions of gradients read
    "powersgd": ("rank", "warmup"), "topk": ("share", "momentum", "warmup", "clip"), "onebit_adam": ("freeze",),
}  # fmt: skip


class CompressConfig(Section):
    """Compression of what replicas exchange: the gradients of bsp, or the changes of diloco."""

    deltas: Literal["none", "int8", "fp8", "int4", "int2"] = key(
        "none",
        "diloco: changes of the parameters since the last exchange, in blocks of 128 values with a scale each; of "
        "islands also async_diloco, both ways",
    )
    gradients: Literal["none", "int8", "fp8", "int4", "int2", "powersgd", "topk", "onebit_adam"] = key(
        "none", "bsp: gradients over mesh.replica, or with one replica over mesh.data, in such blocks; `powersgd`: of "
        "low rank; `topk`: the largest values; `onebit_adam`: signs of the momentum. Of islands in blocks alone, also "
        "ssp and asp, both ways"
    )  # fmt: skip
    error_feedback: Bool = key(True, "keep what is lost, and add it the next time")
    rank: PositiveInt = key(4, "powersgd: rank of a matrix")
    share: NonZeroFraction = key(0.01, "topk: share of the values of a layer that is sent")
    momentum: Share = key(0.0, "topk: momentum of each replica before values are chosen, in place of the optimizer's")
    warmup: Count = key(
        0, "first steps; topk: in which the share falls from 25% by factors of 4 to `share`; powersgd: in float32"
    )
    clip: PositiveFloat | None = key(
        None, "topk: norm of the gradient above which those of replicas are clipped before values are chosen"
    )
    freeze: PositiveInt = key(1000, "onebit_adam: first steps, of exact Adam; then its second moment stays as it is")
    weights: Literal["none", "int8"] = key(
        "none", "weights of stacked layers that are stored in shards (fsdp), when they are gathered; in such blocks"
    )
    secondary: Count = key(
        0, "devices of mesh.fsdp in a node: they keep a copy of these weights together, which the backward pass gathers"
    )

    @model_serializer(mode="wrap")
    def _read_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the keys that the kind of compression does not read."""
        read = GRADIENT_KEYS.get(self.gradients, ())
        unread = [key for keys in GRADIENT_KEYS.values() for key in keys if key not in read]
        other = ("gradients",) if self.gradients == "none" else ("deltas",) if self.deltas == "none" else ()
        default = [name for name in ("weights", "secondary") if getattr(self, name) in ("none", 0)]
        return {key: value for key, value in serialize(self).items() if key not in (*unread, *other, *default)}


class StreamingConfig(Section):
    """Fragments of streaming_diloco, which travel while replicas train on."""

    fragments: PositiveInt = key(4, "parts of the parameters, each exchanged once in `every` steps, one after another")
    tau: Count = key(1, "steps during which a fragment travels; 0: replicas wait for it")
    alpha: Fraction = key(0.5, "share of its own values that a replica keeps when a fragment arrives; 0: none")


class GossipConfig(Section):
    """Graph over which replicas gossip."""

    graph: Literal["ring", "exponential", "matching", "directed"] = key(
        "exponential", "`ring`: with two neighbours; `exponential`: one that is 1, 2, 4... places on; `matching`: a "
        "partner drawn anew each time; `directed`: along `edges`, with the weights of push-sum"
    )  # fmt: skip
    edges: tuple[tuple[Count, Count], ...] = key((), "directed: pairs [sender, receiver] of replicas")
    seed: Count = key(0, "of the partners, and of the messages that are lost")
    drop: Share = key(0.0, "probability with which a message is lost, to study that; push-sum makes up for it")


class StaleConfig(Section):
    """Clocks of the workers of ssp and asp, in virtual time."""

    bound: Count = key(3, "ssp: iterations that a worker may be ahead of the slowest one; 0 is bsp")
    speeds: tuple[PositiveFloat, ...] = key((), "iterations of each worker in a unit of time; default: 1 of all")
    jitter: NonNegative = key(0.5, "each iteration takes longer by a random share of up to this much")
    seed: Count = key(0, "of these shares")


class SyncConfig(Section):
    """Synchronisation of the replicas (`mesh.replica`)."""

    strategy: str = key(
        "bsp", "`bsp`: every step; `local_sgd`: an average every `every` steps; `post_local`: bsp first; `diloco`: an "
        "outer optimizer; `streaming_diloco`: that in fragments, while replicas train on; `muloco`: diloco with Muon, "
        "in 2 bits; `async_diloco`: diloco of islands that do not wait for one another; `gossip`: averages with "
        "neighbours; `ssp` and `asp`: gradients that are some updates old, as of workers of different speeds; or a "
        "user's own `package.module:Class`, or a name that an installed package adds"
    )  # fmt: skip
    every: PositiveInt = key(100, "steps between exchanges; not read by bsp")
    bsp_steps: Count = key(0, "post_local: steps of bsp before the first local one")
    outer: OuterConfig = section(OuterConfig, "all with `loco` in their name: the outer optimizer")
    compress: CompressConfig = section(
        CompressConfig, "bsp and the same: compression of what is exchanged; by default int2 for muloco"
    )
    streaming: StreamingConfig = section(StreamingConfig, "streaming_diloco: fragments, and how they are mixed in")
    gossip: GossipConfig = section(GossipConfig, "gossip: its graph")
    stale: StaleConfig = section(StaleConfig, "ssp and asp: clocks of the workers")
    options: dict[str, Any] = key({}, "keyword arguments of a user's own class")

    @model_validator(mode="before")
    @classmethod
    def _two_bits_of_muloco(cls, given: Any) -> Any:
        """Fills in the default of muloco."""
        if not isinstance(given, dict) or given.get("strategy") != "muloco":
            return given
        compress = given.get("compress", {})
        return {**given, "compress": {"deltas": "int2", **compress}} if isinstance(compress, dict) else given

    @property
    def is_loose(self) -> bool:
        """True if replicas may hold different parameters."""
        return self.strategy != "bsp"

    @property
    def is_rounded(self) -> bool:
        """True if what travels is rounded to few bits."""
        return self.is_compressed or ("outer" in self._read and self.compress.deltas != "none")

    @property
    def is_stale(self) -> bool:
        """True if workers push gradients of parameters that they read some updates ago."""
        return "stale" in self._read

    @property
    def is_compressed(self) -> bool:
        """True if replicas are equal and their gradients travel compressed."""
        return self.strategy == "bsp" and self.compress.gradients != "none"

    def replica_axis(self, sizes: Mapping[str, int | None]) -> str:
        """Returns the mesh axis whose places are the replicas: `data` only for compressed gradients of one replica."""
        return exchange_axis(sizes) if self.is_compressed else "replica"

    @property
    def island_format(self) -> str:
        """Format in which values travel between islands and their servers; `none`: as they are."""
        if "compress" not in self._read:
            return "none"
        return self.compress.gradients if self.strategy in STALE else self.compress.deltas

    @property
    def has_island_residuals(self) -> bool:
        """True if islands keep what their pushes lost by rounding."""
        return self.island_format != "none" and self.compress.error_feedback

    @property
    def is_onebit_adam(self) -> bool:
        """True if replicas are equal, and after some steps the momentum travels in place of the gradients."""
        return self.is_compressed and self.compress.gradients == "onebit_adam"

    @property
    def changes_gathers(self) -> bool:
        """True if the weights of layers are gathered in few bits, or from copies in a node."""
        return (
            "compress" in self._read
            and not self.is_stale
            and (self.compress.weights != "none" or self.compress.secondary > 0)
        )

    @property
    def interval(self) -> int:
        """Steps from one exchange to the next: for streaming_diloco, from one fragment's to that of another."""
        parts = self.streaming.fragments if "streaming" in self._read else 1
        return int(self.every) // parts

    @property
    def is_builtin(self) -> bool:
        """True if the strategy is one of ours, not a user's own."""
        return self.strategy in STRATEGY_KEYS

    def unread(self) -> list[str]:
        """Returns the keys that the strategy does not read."""
        return [name for name in type(self).model_fields if name not in ("strategy", *self._read)]

    @property
    def _read(self) -> tuple[str, ...]:
        return STRATEGY_KEYS.get(self.strategy, ("every", "options"))

    @model_serializer(mode="wrap")
    def _keys_of_strategy(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the keys that the strategy does not read, and but for diloco a section without compression."""
        has_none = self.strategy in (*STALE, "async_diloco") and not (
            self.island_format != "none" or self.changes_gathers
        )
        unread = [*self.unread(), *(["compress"] if has_none else [])]
        return {key: value for key, value in serialize(self).items() if key not in unread}
