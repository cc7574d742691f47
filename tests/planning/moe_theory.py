"""What a mixture of experts has to send, in the terms of wire_theory.

All parts of the model together: the compiler sends each layer's expert gradients while it computes the next layer,
takes one layer out of the loop for that, and joins what this one sends with what comes before or after the loop. So
counts are the most there may be. What balance and z-loss, counts and metrics add up is smaller than what `totals`
leaves out: sums over tokens of [layers, experts] or less, once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from wire_theory import ROWS, Rows, Sizes, moved_norms, rows_of_table, sharded, tp_sp

from jaxtrain.config.schema import Config
from jaxtrain.kernels.moe import BLOCK
from jaxtrain.kernels.moe.routing import expert_capacity


def layers(capacity: float | None) -> dict[str, object]:
    """Changes to the config for experts with a capacity, or None: dropless."""
    moe = f"{{num_experts: 8, top_k: 2, capacity_factor: {'null' if capacity is None else capacity}}}"
    return {
        "model__moe": moe,
        "model__mlp": 1408,
    }


@dataclass(frozen=True)
class Experts:
    """`dense`: the sizes without experts and router. `own`: elements of a layer's experts that a device computes with.
    `places`: of an expert for the tokens of a sequence, or None."""

    dense: Sizes
    count: int
    top_k: int
    own: int
    router: int
    places: int | None

    @classmethod
    def of(cls, config: Config, axes: dict[str, int]) -> Experts:
        moe, s = config.model.moe, Sizes.of(config, axes)
        assert moe is not None
        weights, router = 3 * moe.num_experts * s.embed * config.model.mlp, s.embed * moe.num_experts
        room = (
            None
            if moe.capacity_factor is None
            else expert_capacity(config.data.sequence, moe.num_experts, moe.top_k, moe.capacity_factor)
        )
        own = weights // axes["expert"] // axes["model"]
        return cls(replace(s, weights=s.weights - weights - router), moe.num_experts, moe.top_k, own, router, room)

    @property
    def local(self) -> int:
        """Experts of a device."""
        return self.count // self.dense.axes["expert"]


def merged(rows: Rows) -> Rows:
    """Rows by op and axes, whatever the part."""
    out: Rows = {}
    for (op, axes, _), (count, size) in rows.items():
        before = out.get((op, axes, "step"), (0, 0))
        out[op, axes, "step"] = before[0] + count, before[1] + size
    return out


def added(*parts: Rows) -> Rows:
    """The sum of several tables."""
    out: Rows = {}
    for rows in parts:
        for key, (count, size) in merged(rows).items():
            before = out.get(key, (0, 0))
            out[key] = before[0] + count, before[1] + size
    return out


def moe_differences(measured: Rows, expected: Rows) -> list[str]:
    """One line for every (op, axes) with more runs, or with bytes that differ by more than 2%."""
    out = []
    for key in sorted(measured.keys() | expected.keys()):
        (count, size), (number, theory) = measured.get(key, (0, 0)), expected.get(key, (0, 0.0))
        if count > number or abs(size - theory) > 0.02 * theory:
            out.append(f"{' '.join(key)}: {count} x, {size / 1e6:.3f} MB; theory {number} x, {theory / 1e6:.3f} MB")
    return out


def _weights(e: Experts) -> Rows:
    """All but the experts in shards over fsdp and expert together, as fsdp; the router in float32. The experts of a
    device in shards over fsdp. Ids of the group's tokens, for the table."""
    s = e.dense
    over, both = s.ring("fsdp") * s.layers * e.own * s.width, s.ring("fsdp", "expert")
    ids = s.tokens * s.axes["model"] * s.axes["fsdp"] * s.axes["expert"] * 4
    router = both * s.layers * e.router * 4
    return added(sharded(s, "fsdp", "expert"), rows_of_table(s, "fsdp", "expert"), {
        ("all-gather", "fsdp", "experts"): (6 * s.layers, 2 * over),
        ("reduce-scatter", "fsdp", "experts"): (3 * s.layers, over),
        ("all-gather", "fsdp+expert", "router"): (2 * s.layers, 2 * router),
        ("reduce-scatter", "fsdp+expert", "router"): (s.layers, router),
        ("all-gather", "fsdp+expert", "ids"): (1, both * ids),
    })  # fmt: skip


def _places(e: Experts) -> float:
    """Bytes of all experts' places for a device's own tokens."""
    assert e.places is not None
    return ROWS * e.count * e.places * e.dense.embed * e.dense.width


def ep(e: Experts) -> Rows:
    """Padded: all places go there and back, forward, recomputed (the gates' gradients need them) and backward."""
    s = e.dense
    return added(_weights(e), {
        ("all-to-all", "expert", "tokens"): (6 * s.layers, 6 * s.layers * s.ring("expert") * _places(e)),
    })  # fmt: skip


def _choices(e: Experts) -> Rows:
    """All choices of a device's tokens go there and back, in runs, three times; and how many go where."""
    s, n = e.dense, e.dense.axes["expert"]
    moved = s.ring("expert") * s.tokens * e.top_k * s.embed * s.width
    return {
        ("ragged-all-to-all", "expert", "tokens"): (6 * s.layers, 6 * s.layers * moved),
        ("all-gather", "expert", "counts"): (2 * s.layers, 2 * s.layers * s.ring("expert") * n * e.count * 4),
    }


def ep_dropless(e: Experts) -> Rows:
    """Weights and choices."""
    return added(_weights(e), _choices(e))


def ep_tp(e: Experts) -> Rows:
    """Padded, with tensor and sequence parallelism: the stream moves as in tp_sp. Each member of a tensor-parallel
    group carries its share of the group's places over `expert`; the members gather them and reduce their outputs, three
    times each. Of the routing, worked out on shards of the sequence: expert, place, gate and document of each token."""
    s, share = e.dense, e.dense.ring("model") * e.dense.layers
    group = s.tokens * s.axes["model"]
    moved = 3 * share * _places(e) * s.axes["model"]
    router = e.router * 4 / s.axes["fsdp"] / s.axes["expert"]
    return added(
        {key: row for key, row in _weights(e).items() if key[0] != "all-reduce"},
        {key: row for key, row in tp_sp(s).items() if key[1] == "model"},
        moved_norms({}, "", "fsdp+expert+model", s),
        {
            ("all-to-all", "expert", "tokens"): (6 * s.layers, 6 * s.layers * s.ring("expert") * _places(e)),
            ("all-gather", "model", "places"): (3 * s.layers, moved),
            ("reduce-scatter", "model", "places"): (3 * s.layers, moved),
            ("all-gather", "model", "routing"): (2 * s.layers, share * group * (17 * e.top_k + 5)),
            ("reduce-scatter", "model", "routing"): (s.layers, share * group * 4 * e.top_k),
            ("all-reduce", "model", "routing"): (s.layers, 2 * share * router),
        },
    )  # fmt: skip


def ep_tp_dropless(e: Experts) -> Rows:
    """Dropless, with tensor and sequence parallelism: attention moves the stream as in tp_sp. A device's own choices
    travel over `expert`; what arrives each member hands to every other one and gets back, three times, in runs: at most
    the room for all that could come, and none of it dense. Where the runs of the members begin and how long they are.
    """
    s, m = e.dense, e.dense.axes["model"]
    stream, share = s.ring("model") * s.stream, s.ring("model") * s.layers
    most = s.axes["expert"] * s.tokens * min(e.top_k, e.local)
    room = -(-most // BLOCK) * BLOCK + e.local * BLOCK
    hops = 6 * s.layers * (m - 1)
    router = e.router * 4 / s.axes["fsdp"] / s.axes["expert"]
    return added(
        {key: row for key, row in _weights(e).items() if key[0] != "all-reduce"},
        {key: row for key, row in tp_sp(s).items() if key[:2] == ("all-reduce", "model")},
        moved_norms({}, "", "fsdp+expert+model", s),
        rows_of_table(s, "model"),
        _choices(e),
        {
            ("all-gather", "model", "stream"): (3 * s.layers + 1, (3 * s.layers + 1) * stream),
            ("reduce-scatter", "model", "stream"): (3 * s.layers + 1, (3 * s.layers + 1) * stream),
            ("ragged-all-to-all", "model", "rows"): (hops, hops * s.ring("model") * room * s.embed * s.width),
            ("all-gather", "model", "runs"): (4 * s.layers, 4 * share * m * e.local * 4),
            ("all-reduce", "model", "routing"): (s.layers, 2 * share * router),
        },
    )  # fmt: skip


MOE_LAYOUTS: dict[str, tuple[str, float | None, Callable[[Experts], Rows]]] = {
    "ep": ("ep", 1.25, ep), "ep_dropless": ("ep", None, ep_dropless), "ep_tp": ("ep_tp", 1.25, ep_tp),
    "ep_tp_dropless": ("ep_tp", None, ep_tp_dropless),
}  # fmt: skip
