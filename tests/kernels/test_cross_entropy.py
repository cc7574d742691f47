"""The chunked, fused cross-entropy against plain log-softmax in float64, on one device and on eight."""

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxtrain.kernels.cross_entropy import cross_entropy, recomputes
from jaxtrain.sharding.sharder import Sharder

BATCH, TIME, EMBED, VOCAB = 8, 6, 16, 2048


@dataclass(frozen=True)
class Case:
    name: str
    chunks: int = 4
    vocab: int = VOCAB
    tied: bool = False
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    softcap: float | None = None

    @property
    def options(self):
        return {
            "chunks": self.chunks,
            "tied": self.tied,
            "z_loss": self.z_loss,
            "label_smoothing": self.label_smoothing,
            "softcap": self.softcap,
        }


ALL = {"z_loss": 0.02, "label_smoothing": 0.1, "softcap": 3.0}
CASES = [
    Case("plain"),
    Case("one_chunk", chunks=1),
    Case("small_vocab", vocab=97, chunks=128, **ALL),
    Case("tied", tied=True),
    Case("z_loss", z_loss=0.02),
    Case("smoothing", label_smoothing=0.1),
    Case("softcap", softcap=3.0),
    Case("odd_vocab", vocab=2099),
    Case("odd_vocab_all", vocab=2099, **ALL),
    Case("odd_vocab_all_tied", vocab=2099, tied=True, **ALL),
]


def inputs(case, dtype=np.float32):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, TIME, EMBED))
    head = rng.normal(size=(EMBED, case.vocab)) * 0.5
    targets = rng.integers(0, case.vocab, (BATCH, TIME)).astype(np.int32)
    weights = (rng.random((BATCH, TIME)) > 0.3).astype(np.float32)
    weights[0] = 0  # a row that does not count
    targets[0] = -1  # and whose targets are no ids
    return x.astype(dtype), (head.T if case.tied else head).astype(dtype), targets, weights


def plain(x, head, targets, weights, case):
    """Mean loss, its terms, and gradients w.r.t. x and head, by log-softmax in float64."""
    x, head = x.astype(np.float64), head.astype(np.float64)
    head = head.T if case.tied else head
    raw = x @ head
    logits = case.softcap * np.tanh(raw / case.softcap) if case.softcap else raw
    top = logits.max(-1, keepdims=True)
    z = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    goal = (1 - case.label_smoothing) * np.eye(case.vocab)[targets] + case.label_smoothing / case.vocab
    nll = -(goal * (logits - z[..., None])).sum(-1)
    total = weights.sum()
    terms = {"cross_entropy": (weights * nll).sum()}
    if case.z_loss:
        terms["z_loss"] = case.z_loss * (weights * z**2).sum()
    p = np.exp(logits - z[..., None])
    d = (p - goal + 2 * case.z_loss * z[..., None] * p) * weights[..., None] / total
    if case.softcap:
        d *= 1 - (logits / case.softcap) ** 2
    dhead = np.einsum("btd,btv->dv", x, d)
    return sum(terms.values()) / total, terms, d @ head.T, dhead.T if case.tied else dhead


def run(case, sharder=None, names=None):
    def loss(x, head, targets, weights):
        terms = cross_entropy(x, head, targets, weights, sharder=sharder, names=names, **case.options)
        return sum(s / w for s, w in terms.values()), terms

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def close(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def check(result, arrays, case, tolerance=1e-6):
    (loss, terms), (dx, dhead) = result
    expected, sums, dx_expected, dhead_expected = plain(*arrays, case)
    close(loss, expected, tolerance)
    assert terms.keys() == sums.keys()
    for name, (total, weight) in terms.items():
        assert total.dtype == weight.dtype == jnp.float32
        close(total, sums[name], tolerance)
        assert weight == arrays[3].sum()
    close(dx, dx_expected, tolerance)
    close(dhead, dhead_expected, tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda w: w.name)
def test_matches_log_softmax(case):
    arrays = inputs(case)
    check(run(case)(*arrays), arrays, case)


def test_bfloat16_has_float32_sums_and_gradients_in_the_dtype_of_the_head():
    case = Case("bf16", **ALL)
    x, head, targets, weights = arrays = inputs(case)
    _, (dx, dhead) = result = run(case)(jnp.asarray(x, jnp.bfloat16), head, targets, weights)
    assert dx.dtype == jnp.bfloat16
    assert dhead.dtype == jnp.float32
    check(result, arrays, case, tolerance=2**-7)


def test_large_logits_do_not_overflow():
    case = Case("large")
    x, head, targets, weights = inputs(case)
    arrays = (x * 200, head, targets, weights)
    check(run(case)(*arrays), arrays, case, tolerance=1e-5)


def sharder_of(sizes, rules):
    mesh = Mesh(
        np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    return Sharder(mesh, rules)


FSDP_TP = {"batch": ("fsdp",), "embed": ("fsdp",), "vocab": ("model",), "sequence": ("model",)}
ALL_AXES = {**FSDP_TP, "batch": ("data", "fsdp")}
LAYOUTS = {
    "fsdp8": ({"fsdp": 8}, FSDP_TP | {"vocab": (), "sequence": ()}),
    "fsdp4_model2": ({"fsdp": 4, "model": 2}, FSDP_TP),
    "data2_fsdp2_model2": ({"data": 2, "fsdp": 2, "model": 2}, ALL_AXES),
    "context2_fsdp2_model2": (
        {"fsdp": 2, "context": 2, "model": 2},
        FSDP_TP | {"context": ("context",), "sequence": ("context", "model")},
    ),
    "vocab_on_fsdp_too": ({"fsdp": 4, "model": 2}, FSDP_TP | {"embed": (), "vocab": ("model", "fsdp")}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_eight_devices_equal_one(layout, tied):
    sharder = sharder_of(*LAYOUTS[layout])
    case = Case(layout, vocab=2104, chunks=3, tied=tied, **ALL)  # 512 + 512 + 512 of 1052: the last overlaps
    arrays = inputs(case)
    stored = ("vocab", "embed") if tied else ("embed", "vocab")
    names = (("batch", "context", None), stored, ("batch", "context"), ("batch", "context"))
    placed = [jax.device_put(a, sharder.sharding(n)) for a, n in zip(arrays, names)]
    result = run(case, sharder)(*placed)
    check(result, arrays, case)
    assert result[1][1].sharding.is_equivalent_to(sharder.sharding(stored), 2)


def test_vocab_that_the_shards_do_not_divide():
    sharder = sharder_of({"fsdp": 4, "model": 2}, FSDP_TP | {"table": ("model", "fsdp")})
    case = Case("odd", vocab=2099, tied=True, **ALL)
    arrays = inputs(case)
    stored = (None, "table")  # an embedding table cut along its width alone
    table = jax.device_put(arrays[1], sharder.sharding(stored))
    result = run(case, sharder, stored)(arrays[0], table, *arrays[2:])
    check(result, arrays, case)
    assert result[1][1].sharding.is_equivalent_to(sharder.sharding(stored), 2)


@pytest.mark.parametrize(("axes", "again"), [(("fsdp",), True), (("model",), False), (("model", "fsdp"), False)])
def test_only_several_chunks_of_a_shard_are_recomputed(axes, again):
    """1024 ids in two chunks at most of 512: gathered over `fsdp` there are two, of each of two shards one."""
    sharder = sharder_of({"fsdp": 4, "model": 2}, FSDP_TP | {"vocab": axes, "embed": ()})
    x, head, ids = jnp.ones((4, 2, 8)), jnp.ones((8, 1024)), jnp.ones((4, 2), jnp.int32)
    loss = lambda x: cross_entropy(x, head, ids, jnp.ones((4, 2)), chunks=2, sharder=sharder)["cross_entropy"][0]  # noqa: E731
    assert recomputes(1024, 2, sharder) == again == ("scan" in str(jax.make_jaxpr(jax.grad(loss))(x)))


def test_logits_of_the_batch_never_exist():
    batch, time, embed, vocab = 2, 64, 32, 8192
    shapes = [(batch, time, embed), (embed, vocab), (batch, time), (batch, time)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    args = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes)]
    compiled = run(Case("memory", chunks=16)).lower(*args).compile()
    assert not re.search(rf"f32\[({batch},{time}|{batch * time}),(1,)?{vocab}\]", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < batch * time * vocab * 4 / 2


def test_each_chunk_of_a_sharded_head_is_gathered_once_per_pass():
    sharder = sharder_of({"fsdp": 8}, FSDP_TP | {"vocab": (), "sequence": ()})
    case = Case("gathers", vocab=4096, chunks=4)
    names = (("batch", None, None), ("embed", "vocab"), ("batch", None), ("batch", None))
    shapes = [(BATCH, TIME, EMBED), (EMBED, 4096), (BATCH, TIME), (BATCH, TIME)]
    dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    args = [jax.ShapeDtypeStruct(s, d, sharding=sharder.sharding(n)) for s, d, n in zip(shapes, dtypes, names)]
    text = run(case, sharder).lower(*args).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    sizes = [int(np.prod([int(n) for n in s.split(",")])) for s in gathered]
    assert sizes == [EMBED * 1024] * 2  # a chunk in the forward loop, a chunk in the backward loop


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunks": 0}, "chunks is 0; expected at least 1"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"tied": True}, r"head \(16, 2048\) does not fit"),
        ({"targets_BT": jnp.zeros((8, 5), jnp.int32)}, r"must be \(8, 6\)"),
    ],
)
def test_errors_are_one_line(change, message):
    names = ("x_BTD", "head", "targets_BT", "weights_BT")
    with pytest.raises(ValueError, match=message) as error:
        cross_entropy(**{**dict(zip(names, inputs(Case("errors")))), **change})
    assert "\n" not in str(error.value)
