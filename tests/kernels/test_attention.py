"""Every attention kernel on every spec, forward and gradients, against the reference; and that against NumPy."""

import itertools
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxtrain.kernels import attention as room
from jaxtrain.kernels.attention import RESIDUALS, attention, cudnn, splash, xla
from jaxtrain.kernels.attention.spec import AttnSpec, TokenOrder
from jaxtrain.sharding.sharder import Sharder

HEAD_DIM = 8
QUICK = {"xla_backend_optimization_level": 0}  # compile in half the time
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


@dataclass(frozen=True)
class Case:
    causal: bool
    window: int | None
    segments: str | None  # packed: documents and padding at the end; masked: the same and a row of padding only
    heads: str
    softcap: float | None

    def __str__(self):
        order = "causal" if self.causal else "both"
        return f"{order}-w{self.window}-{self.segments}-{self.heads}-cap{self.softcap}"

    @property
    def options(self):
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}


EVERY = [Case(*w) for w in itertools.product((True, False), (None, 5), (None, "masked"), HEADS, (None, 3.0))]
# For the kernels that are slow to compile here: each mask with and without segments, heads and caps cycle.
SOME = [
    Case(c, w, s, heads, cap)
    for (c, w, s), heads, cap in zip(
        itertools.product((True, False), (None, 5), (None, "masked")),
        itertools.cycle(HEADS),
        itertools.cycle((3.0, None, None, 3.0)),
    )
]


def segments_of(kind, batch, time):
    if kind is None:
        return None
    ids = np.zeros((batch, time), np.int32)
    ids[0, : time // 3] = 1
    ids[0, time // 3 : time - 4] = 2
    ids[1, :1] = 1  # a document of one token
    ids[1, 1:-3] = 2
    ids[1, -3:] = 3
    if kind == "masked":
        ids[1] = 0
    return ids


@cache
def inputs(time, heads, dtype="float32", batch=2):
    H, K = HEADS[heads]
    rng = np.random.default_rng(time)
    shapes = [(batch, time, n, HEAD_DIM) for n in (H, K, K, H)]
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def numpy_attention(q, k, v, g, case, segments):
    """Outputs and gradients by loops over rows and heads in float64."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    B, T, H, D = q.shape
    group = H // k.shape[2]
    o, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, t, h in itertools.product(range(B), range(T), range(H)):
        seen = [
            s
            for s in range(T)
            if (not case.causal or s <= t)
            and (case.window is None or abs(t - s) < case.window)
            and (segments is None or segments[b, t] == segments[b, s] != 0)
        ]
        if not seen:
            continue
        key, value = k[b, seen, h // group], v[b, seen, h // group]
        raw = key @ q[b, t, h] / np.sqrt(D)
        capped = raw if case.softcap is None else case.softcap * np.tanh(raw / case.softcap)
        p = np.exp(capped - capped.max())
        p /= p.sum()
        o[b, t, h] = p @ value
        dp = value @ g[b, t, h]
        ds = p * (dp - p @ dp)
        if case.softcap is not None:
            ds *= 1 - (capped / case.softcap) ** 2
        dq[b, t, h] = ds @ key / np.sqrt(D)
        np.add.at(dk, (b, seen, h // group), ds[:, None] * q[b, t, h] / np.sqrt(D))
        np.add.at(dv, (b, seen, h // group), p[:, None] * g[b, t, h])
    return o, dq, dk, dv


def outputs(call, q, k, v, g):
    out, pull = jax.vjp(call, q, k, v)
    return (out, *pull(g.astype(out.dtype)))


def kernel_function(kernel, case, segments):
    ids = None if segments is None else jnp.asarray(segments)
    if kernel == "blocks":  # as `xla` does long sequences, with blocks small enough for a test
        spec = AttnSpec(case.causal, case.window, case.softcap, HEAD_DIM**-0.5)
        return lambda q, k, v: xla.attention(q, k, v, spec, TokenOrder(ids, ids), block=4)
    return lambda q, k, v: attention(q, k, v, segments_BT=ids, kernel=kernel, **case.options)


def check(actual, expected, tolerance):
    for name, a, b in zip(("o", "dq", "dk", "dv"), actual, expected):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all(), f"{name} is not finite"
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)
        assert error < tolerance, f"{name} is off by {error:.1e} of its largest value"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_reference_and_xla_match_numpy(case):
    time = 14
    segments = segments_of(case.segments, 2, time)
    arrays = inputs(time, case.heads)
    expected = numpy_attention(*arrays, case, segments)
    for kernel in ("reference", "xla"):
        check(outputs(kernel_function(kernel, case, segments), *arrays), expected, 3e-6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", SOME, ids=str)
@pytest.mark.parametrize(("kernel", "time"), [("blocks", 22), ("splash", 200)])
def test_kernel_matches_numpy(kernel, time, case, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 128)  # two tiles, the second partly padding
    segments = segments_of(case.segments, 2, time)
    arrays = inputs(time, case.heads)
    run = jax.jit(partial(outputs, kernel_function(kernel, case, segments)), compiler_options=QUICK)
    check(run(*arrays), numpy_attention(*arrays, case, segments), 3e-6)


def gpu():
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        return None


CUDNN = [w for w in EVERY if w.softcap is None and (w.causal or not w.window)]
FEW = {2: "large_limit", 3: "small_limit"}  # packed rows hold 3 runs


@pytest.mark.skipif(gpu() is None, reason="no GPU for cuDNN attention")
@pytest.mark.parametrize(
    ("case", "few"),
    [pytest.param(w, few, id=f"{w}-{FEW[few]}") for w in CUDNN for few in (FEW if w.segments else [3])],
)
def test_cudnn_matches_reference(case, few, monkeypatch):
    monkeypatch.setattr(cudnn, "FEW_RUNS", few)
    with jax.default_device(gpu()):
        segments = segments_of(case.segments, 2, 256)
        arrays = [jax.device_put(np.asarray(x), gpu()) for x in inputs(256, case.heads, "bfloat16")]
        expected = outputs(kernel_function("reference", case, segments), *(x.astype(jnp.float32) for x in arrays))
        check(jax.jit(partial(outputs, kernel_function("cudnn", case, segments)))(*arrays), expected, 2e-2)


def test_bfloat16_stays_near_float32():
    case = Case(True, None, "packed", "gqa", None)
    segments = segments_of("packed", 2, 14)
    expected = numpy_attention(*inputs(14, "gqa"), case, segments)
    actual = outputs(kernel_function("xla", case, segments), *inputs(14, "gqa", "bfloat16"))
    assert all(x.dtype == jnp.bfloat16 for x in actual)
    check(actual, expected, 2e-2)


def test_segments_separate_documents():
    q, k, v, _ = inputs(14, "gqa")
    ids = jnp.asarray(segments_of("packed", 2, 14))
    other = k.at[0, :4].add(100.0), v.at[0, :4].add(100.0)
    for kernel in ("reference", "xla"):
        run = partial(attention, segments_BT=ids, kernel=kernel)
        a, b = run(q, k, v), run(q, *other)
        np.testing.assert_array_equal(a[0, 4:], b[0, 4:])
        np.testing.assert_array_equal(a[0, 10:], 0)
        assert np.abs(np.asarray(a - b)[0, :4]).max() > 1


@pytest.mark.parametrize("kernel", ["reference", "xla"])
def test_cache_equals_the_whole_sequence(kernel):
    q, k, v, _ = inputs(14, "gqa")
    whole = attention(q, k, v, window=6, kernel="reference")
    # A cache of 20 slots in any order, 14 of them filled; the last 3 tokens ask.
    order = np.random.default_rng(0).permutation(20)
    slots = np.argsort(order)[:14]
    key, value = (jnp.full((2, 20, 2, HEAD_DIM), jnp.nan).at[:, slots].set(x) for x in (k, v))
    filled = jnp.zeros((2, 20), jnp.int32).at[:, slots].set(1)
    positions = jnp.full((2, 20), 99, jnp.int32).at[:, slots].set(np.arange(14))
    actual = attention(
        q[:, 11:],
        jnp.nan_to_num(key),
        jnp.nan_to_num(value),
        segments_BT=jnp.ones((2, 3), jnp.int32),
        positions_BT=jnp.broadcast_to(jnp.arange(11, 14), (2, 3)),
        kv_segments_BS=filled,
        kv_positions_BS=positions,
        window=6,
        kernel=kernel,
    )
    np.testing.assert_allclose(actual, whole[:, 11:], atol=2e-6)


def test_window_may_differ_from_layer_to_layer():
    q, k, v, _ = inputs(14, "gqa")
    one = jax.jit(lambda window: attention(q, k, v, window=window, kernel="xla"))
    np.testing.assert_allclose(one(jnp.int32(5)), attention(q, k, v, window=5, kernel="reference"), atol=2e-6)
    np.testing.assert_allclose(one(jnp.int32(2**30)), attention(q, k, v, kernel="reference"), atol=2e-6)
    spec = AttnSpec(True, jnp.int32(5), None, HEAD_DIM**-0.5)
    blocks = jax.jit(lambda: xla.attention(q, k, v, spec, TokenOrder(), block=4))()
    np.testing.assert_allclose(blocks, one(jnp.int32(5)), atol=2e-6)


def eight():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    return Sharder(mesh, {"batch": ("data", "fsdp"), "heads": ("model",), "kv_heads": ("model",)})


@pytest.mark.parametrize("kernel", ["reference", "xla", "splash"])
def test_eight_devices_equal_one(kernel):
    sharder = eight()
    time = 130 if kernel == "splash" else 14
    arrays = inputs(time, "gqa", batch=8)
    ids = np.tile(segments_of("masked", 2, time), (4, 1))
    expected = numpy_attention(*arrays, Case(True, None, "masked", "gqa", None), ids)
    names = ("batch", None, "heads", None), *[("batch", None, "kv_heads", None)] * 2, ("batch", None, "heads", None)
    placed = [jax.device_put(x, sharder.sharding(n)) for x, n in zip(arrays, names)]
    rows = jax.device_put(ids, sharder.sharding(("batch", None)))
    run = partial(attention, kernel=kernel, sharder=sharder)
    actual = jax.jit(lambda ids, *a: outputs(partial(run, segments_BT=ids), *a), compiler_options=QUICK)(rows, *placed)
    check(actual, expected, 3e-6)
    assert actual[0].addressable_shards[0].data.shape == (2, time, 2, HEAD_DIM)


def test_long_sequences_need_no_quadratic_memory():
    shape = jax.ShapeDtypeStruct((1, 4096, 4, 16), jnp.float32)

    def temporaries(kernel):
        run = jax.grad(lambda q, k, v: attention(q, k, v, kernel=kernel).sum(), argnums=(0, 1, 2))
        return jax.jit(run).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * 4096 * 4096 * 4
    assert temporaries("reference") > scores
    assert temporaries("xla") < scores / 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": "flash"}, "no kernel `flash`"),
        ({"kernel": "cudnn"}, "`cudnn` runs on NVIDIA GPUs, not on cpu; `xla`"),
        ({"kernel": "splash", "window": jnp.int32(4)}, "`splash` needs a window known when tracing"),
        ({"kernel": "splash", "kv_segments_BS": jnp.ones((2, 14), jnp.int32)}, "`splash` supports self-attention"),
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"kv_positions_BS": jnp.ones((2, 14), jnp.int32)}, "kv_positions_BS needs positions_BT"),
    ],
)
def test_refusals_are_one_line(options, message):
    q, k, v, _ = inputs(14, "gqa")
    with pytest.raises(ValueError, match=message) as error:
        attention(q, k, v, **options)
    assert "\n" not in str(error.value)


def test_shapes_are_checked():
    q, k, v, _ = inputs(14, "gqa")
    with pytest.raises(ValueError, match="heads a multiple of kv_heads"):
        attention(q[:, :, :3], k, v)
    with pytest.raises(ValueError, match="have no common order"):
        attention(q[:, :3], k, v)
    with pytest.raises(ValueError, match="7 batch are not divisible by 4 shards"):
        attention(*(x[jnp.zeros(7, int)] for x in (q, k, v)), kernel="splash", sharder=eight())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, None),
        ({"dtype": "float32"}, "bfloat16"),
        ({"softcap": 2.0}, "softcap"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"head_dim": 320}, "at most 256"),
        ({"head_dim": 256, "hopper": False}, "at most 128"),
        ({"causal": False, "window": 3}, "causal=True"),
        ({"source": 9}, "as many keys"),
        ({"time": 13, "source": 13}, "even number"),
    ],
)
def test_reasons_for_unsupported_options_of_cudnn(options, message):
    o = {"dtype": "bfloat16", "softcap": None, "head_dim": 64, "hopper": True, "causal": True, "window": None} | options
    spec = AttnSpec(o["causal"], o["window"], o["softcap"], 1.0)
    shapes = (2, o.get("time", 14), 4, o["head_dim"]), (2, o.get("source", 14), 2, o["head_dim"])
    reason = cudnn.unsupported_reason(spec, *shapes, o["dtype"], o["hopper"])
    assert reason is None if message is None else message in reason


def test_auto_is_the_platform_kernel_or_xla():
    class Gpu:
        platform, compute_capability = "gpu", "9.0"

    q, k, _, _ = inputs(14, "gqa", "bfloat16")
    plain, capped = AttnSpec(True, None, None, 1.0), AttnSpec(True, None, 3.0, 1.0)
    assert room._choose("auto", plain, True, q, k, Gpu()) == "cudnn"
    assert room._choose("auto", capped, True, q, k, Gpu()) == "xla"
    assert room._choose("auto", plain, False, q, k, Gpu()) == "xla"
    assert room._choose("auto", plain, True, q, k, jax.devices()[0]) == "xla"
    Gpu.compute_capability = "gfx942"  # a GPU without CUDA
    assert room._choose("auto", plain, True, q, k, Gpu()) == "xla"


def without_cudnn(monkeypatch, packed):
    """cuDNN's calls replaced: the packed one by `packed`, the public one by JAX's own."""
    from jax._src.cudnn import fused_attention_stablehlo as interface

    public = jax.nn.dot_product_attention
    monkeypatch.setattr(interface, "dot_product_attention", packed)
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **k: public(*a, **k))


PACKED = [
    Case(True, None, "packed", "gqa", None),
    Case(True, 5, "masked", "mqa", None),
    Case(False, None, "masked", "mha", None),
]


@pytest.mark.parametrize("few", FEW, ids=FEW.get)
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_cudnn_packing(case, few, monkeypatch):
    """The sequences handed to cuDNN, with cuDNN replaced by what its interface message it does."""
    monkeypatch.setattr(cudnn, "FEW_RUNS", few)
    from jax._src.cudnn.fused_attention_stablehlo import MaskType

    def stand_in(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length):
        if not cudnn._grouped_offsets_are_right():
            assert q.shape == k.shape  # else JAX would read the keys of other tokens
        starts, sizes = q_offsets[:, None, :-1], q_seqlen[:, None]
        token = jnp.arange(q.shape[1])[None, :, None]
        inside = (sizes > 0) & (token >= starts) & (token < starts + sizes)
        assert q_offsets.shape == (q.shape[0], q_seqlen.shape[1] + 1)
        ids = jnp.where(inside.any(-1), jnp.argmax(inside, axis=-1) + 1, 0)
        causal = mask_type == MaskType.PADDING_CAUSAL
        return attention(
            q, k, v, segments_BT=ids, causal=causal, window=sliding_window_length, scale=scale, kernel="reference"
        )

    without_cudnn(monkeypatch, stand_in)
    time = 14
    segments = segments_of(case.segments, 2, time)
    spec = AttnSpec(case.causal, case.window, None, HEAD_DIM**-0.5)
    arrays = inputs(time, case.heads)
    run = partial(cudnn.attention, segments_BT=jnp.asarray(segments), spec=spec, hopper=True)
    actual = jax.jit(partial(outputs, run), compiler_options=QUICK)(*arrays)
    check(actual, numpy_attention(*arrays, case, segments), 3e-6)


@pytest.mark.parametrize(("blocks", "hopper"), [(1, True), (3, False)], ids=["too_many_documents", "before_hopper"])
def test_cudnn_with_a_mask(blocks, hopper, monkeypatch):
    monkeypatch.setattr(cudnn, "MAX_MASK", 2 * 48 * 48 // blocks)
    without_cudnn(monkeypatch, lambda q, *_, **__: jnp.full_like(q, jnp.nan))
    arrays = inputs(48, "gqa")
    many = np.tile(np.arange(48, dtype=np.int32) // 2 + 1, (2, 1))
    many[0, -6:] = 0
    case = Case(True, None if blocks == 1 else 3, "many", "gqa", None)
    spec = AttnSpec(case.causal, case.window, None, HEAD_DIM**-0.5)
    run = partial(cudnn.attention, segments_BT=jnp.asarray(many), spec=spec, hopper=hopper)
    run = jax.jit(partial(outputs, run), compiler_options=QUICK)
    check(run(*arrays), numpy_attention(*arrays, case, many), 3e-6)
    few = cudnn.attention(*arrays[:3], jnp.asarray(many // 4), spec, hopper)
    assert np.isnan(few).any() == hopper  # these few documents do go to cuDNN's packed layout


def test_saved_residuals_avoid_a_second_forward():
    q, k, v, g = inputs(128, "mha")

    def loops(policy):  # an interpreted kernel is a loop; backward is two of them
        layer = jax.checkpoint(lambda q, k, v: jnp.sin(attention(q, k, v, kernel="splash")), policy=policy)
        return jax.jit(partial(outputs, layer)).lower(q, k, v, g).compile(QUICK).as_text().count(" while(")

    assert loops(None) == 4
    assert loops(jax.checkpoint_policies.save_only_these_names(RESIDUALS)) == 3
