"""FLOPs, memory traffic and rooflines: of instructions by hand, of compiled steps against the formula."""

from __future__ import annotations

import jax
import pytest
from wire_theory import LLAMA, configured

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.hlo import matmuls, memory_traffic, parse
from jaxtrain.models.flops import layer_matmuls, recomputed
from jaxtrain.planning import compile, step_program
from jaxtrain.planning.cost import memory, roofline
from jaxtrain.planning.hardware import targets

H100 = "h100:1x4"
NO_COMPILER = targets.missing_packages(targets.parse(H100), "xla")


def module(*lines: str, more: str = "") -> parse.Module:
    body = "\n".join(f"  {line}" for line in lines)
    return parse.parse(f"HloModule jit_step\n\n{more}\n\nENTRY %main (p: f32[8]) -> f32[] {{\n{body}\n}}\n")


def work(*lines: str, visible: float = 0.5) -> matmuls.MatmulWork:
    computation = module(*lines).computations["main"]
    found = [matmuls.matmul_work(one, computation, visible) for one in computation.values()]
    (only,) = [one for one in found if one is not None]
    return only


def test_flops_of_dots():
    found = work(
        "%a = bf16[4,128,64]{2,1,0} parameter(0)",
        "%b = bf16[4,64,32]{2,1,0} parameter(1)",
        "ROOT %d = f32[4,128,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0},"
        " rhs_contracting_dims={1}",
    )
    assert found == matmuls.MatmulWork("bf16", 2 * 4 * 128 * 64 * 32)


@pytest.mark.parametrize(("more", "dtype"), [("", "tf32"), (", operand_precision={highest,highest}", "f32")])
def test_float32_at_default_precision_is_not_float32(more: str, dtype: str):
    lines = "%a = f32[8,8]{1,0} parameter(0)", f"ROOT %d = f32[8,8] dot(%a, %a), lhs_contracting_dims={{1}}{more}"
    assert work(*lines).dtype == dtype


def test_flops_of_convolutions_leave_out_padding():
    # A matmul of 2 x 1024 rows of 512 with [512, 8 * 128], as TPU writes it: heads are a window over padding.
    found = work(
        "%a = bf16[2,1024,512,1]{3,2,1,0} parameter(0)",
        "%b = bf16[512,8,128,1]{3,2,1,0} parameter(1)",
        "ROOT %c = bf16[2,1024,8,128]{3,2,1,0} convolution(%a, %b), window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1},"
        " dim_labels=0bf1_i1o0->0b1f",
    )
    assert found.flops == 2 * 2 * 1024 * 512 * 8 * 128


def test_flops_of_a_strided_and_a_dilated_convolution():
    shapes = "%a = f32[1,8,3]{2,1,0} parameter(0)", "%b = f32[3,3,5]{2,1,0} parameter(1)"
    labels = "dim_labels=b0f_0io->b0f"
    strided = work(*shapes, f"ROOT %c = f32[1,4,5] convolution(%a, %b), window={{size=3 stride=2 pad=1_1}}, {labels}")
    assert strided.flops == 2 * 3 * 5 * (4 * 3 - 1)  # one product meets the padding in front
    dilated = work(
        *shapes, f"ROOT %c = f32[1,15,5] convolution(%a, %b), window={{size=3 pad=1_1 lhs_dilate=2}}, {labels}"
    )
    assert dilated.flops == 2 * 3 * 5 * (8 + 7 * 2)  # even outputs meet the middle of the kernel, odd ones its ends


def fmha(target: str, mask: str, window: int = 0) -> matmuls.MatmulWork:
    config = (
        '{"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
        f'["2", "8", "1024", "1024"]}}, "mask_type": "{mask}", "sliding_window_length": {window}}}}}'
    )
    return work(
        "%q = bf16[2,1024,8,128]{3,2,1,0} parameter(0)",
        f'ROOT %f = (bf16[2,8,1024,128]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %q, %q), custom_call_target="{target}",'
        f" backend_config={config}",
    )


def test_flops_of_cudnn_attention():
    scores = 2 * 2 * 8 * 1024 * 128
    assert fmha("__cudnn$fmhaSoftmax", "NO_MASK") == matmuls.MatmulWork("bf16", 2 * scores * 1024, 0.0, True)
    causal = fmha("__cudnn$fmhaSoftmax", "PADDING_CAUSAL")
    assert causal.flops == 2 * scores * 512.5
    backward = fmha("__cudnn$fmhaSoftmaxBackward", "CAUSAL")
    assert (backward.flops, backward.recomputed) == (2 * causal.flops, causal.flops / 2)
    near = fmha("__cudnn$fmhaSoftmax", "CAUSAL", window=256)
    assert near.flops == 2 * scores * (256 * 257 / 2 + 768 * 256) / 1024


@pytest.mark.parametrize(
    ("target", "scratch", "slots", "bytes_"),
    [
        ("__cudnn$fmhaSoftmaxBackward", 0, 16, 4 * 2 * 8 * 1024 * 128 * 16),
        ("__cudnn$fmhaScaleBiasSoftmaxBackward", 0, 1, 4 * 2 * 8 * 1024 * 128),
        ("__cudnn$fmhaSoftmaxBackward", 4096, 16, 0),  # compiled by the GPU: it is a temporary like others
        ("__cudnn$fmhaSoftmax", 0, 16, 0),
    ],
)
def test_workspace_of_cudnn_attention(target, scratch, slots, bytes_):
    found = module(
        "%q = bf16[2,1024,8,128]{3,2,1,0} parameter(0)",
        f"ROOT %f = (bf16[2,8,1024,128]{{3,1,2,0}}, u8[{scratch}]{{0}}) custom-call(%q, %q, %q), "
        f'custom_call_target="{target}", '
        f'backend_config={{"cudnn_fmha_backend_config": {{"max_seg_per_batch": {slots}}}}}',
    )
    assert memory.attention_workspace(found) == bytes_


def test_flops_of_splash_and_of_cublas():
    splash = work(
        "%m = s8[1,2,2]{2,1,0} parameter(0)",
        "%q = bf16[2,8,1024,128]{3,2,1,0} parameter(1)",
        "%k = bf16[2,4,1024,128]{3,2,1,0} parameter(2)",
        "ROOT %splash_mha_dkv_segmented_no_residuals.1 = (bf16[2,4,1024,128]{3,2,1,0}) custom-call(%m, %q, %k, %k),"
        ' custom_call_target="tpu_custom_call"',
        visible=0.25,
    )
    product = 2 * 2 * 8 * 1024 * 1024 * 128 * 0.25
    assert splash == matmuls.MatmulWork("bf16", 2 * product, 2 * product, True)
    gemm = work(
        "%a = bf16[64,32]{1,0} parameter(0)",
        "%b = bf16[64,16]{1,0} parameter(1)",
        'ROOT %g = (bf16[32,16]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm",'
        ' backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}',
    )
    assert gemm.flops == 2 * 64 * 32 * 16


FUSION = """
%fused (a: f32[64,128], b: f32[1,128], i: s32[]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %b = f32[16,128]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %row = f32[1,128]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,128}
  ROOT %u = f32[64,128]{1,0} dynamic-update-slice(%a, %row, %i, %i)
}
"""


@pytest.mark.parametrize(
    "line",
    [
        "f32[64,128]{1,0} fusion(%a, %b, %i)",
        "((f32[64,128]{1,0}, f32[16,128]{1,0}, s32[]), f32[64,128]{1,0}, u32[]) fusion-start(%a, %b, %i)",
    ],
    ids=["fusion", "asynchronous"],
)
def test_a_fusion_reads_the_slice_and_writes_the_update(line):
    fused = module(
        "%a = f32[64,128]{1,0} parameter(0)",
        "%b = f32[16,128]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        f"ROOT %f = {line}, kind=kLoop, calls=%fused",
        more=FUSION,
    )
    computation = fused.computations["main"]
    assert memory_traffic.hbm_bytes(fused, computation["f"], computation) == 128 * 4 + 4 + 128 * 4


def test_what_lies_on_the_chip_costs_no_traffic():
    found = module(
        "%a = bf16[256]{0:T(1024)S(1)} parameter(0)",
        "%b = bf16[256]{0} parameter(1)",
        "%c = bf16[256]{0:S(1)} add(%a, %b)",
        "ROOT %s = (bf16[256]{0:S(5)}, bf16[256]{0}, u32[]) copy-start(%b)",
    )
    computation = found.computations["main"]
    assert memory_traffic.hbm_bytes(found, computation["c"], computation) == 512
    assert memory_traffic.hbm_bytes(found, computation["s"], computation) == 512


def test_an_asynchronous_slice_reads_its_part_alone():
    found = module(
        "%a = bf16[4096]{0} parameter(0)",
        "ROOT %s = ((bf16[4096]{0}), bf16[256]{0:S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:256]}",
    )
    computation = found.computations["main"]
    assert memory_traffic.hbm_bytes(found, computation["s"], computation) == 2 * 256


KEPT, LAYER = "bf16[8,4,16]{2,1,0:S(5)}", "bf16[1,4,16]{2,1,0}"  # of 8 layers on the host, of one on the device
WRITES = f"""
%writes (p0: bf16[8,4,16], p1: bf16[1,4,16], p2: s32[]) -> bf16[8,4,16] {{
  %p0 = {KEPT} parameter(0)
  %p1 = {LAYER} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %u = {KEPT} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)
}}
%reads (p0: bf16[8,4,16], p1: s32[]) -> bf16[1,4,16] {{
  %p0 = {KEPT} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %d = {LAYER} dynamic-slice(%p0, %p1, %p1, %p1), dynamic_slice_sizes={{1,4,16}}
}}
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"(({KEPT}, {LAYER}, s32[]), {KEPT}, u32[]) dynamic-update-slice-start(%k, %l, %i)", ("to host", 128)),
        (f"(({KEPT}, s32[]), {LAYER}, u32[]) dynamic-slice-start(%k, %i)", ("from host", 128)),
        (f"(({KEPT}, {LAYER}, s32[]), {KEPT}, u32[]) fusion-start(%k, %l, %i), calls=%writes", ("to host", 128)),
        (f"(({KEPT}, s32[]), {LAYER}, u32[]) fusion-start(%k, %i), calls=%reads", ("from host", 128)),
        (f"({KEPT}, bf16[8,4,16]{{2,1,0}}, u32[]) copy-start(%all)", ("to host", 1024)),
        (f"(bf16[8,4,16]{{2,1,0}}, {KEPT}, u32[]) copy-start(%k)", ("from host", 1024)),
        (f'{KEPT} custom-call(), custom_call_target="AllocateBuffer"', ("", 0)),
        (f"{KEPT} bitcast(%k)", ("", 0)),
        (f"{LAYER} add(%l, %l)", ("", 0)),
    ],
)
def test_bytes_between_device_and_host(line, expected):
    found = module(
        f"%k = {KEPT} parameter(0)", f"%l = {LAYER} parameter(1)", "%i = s32[] parameter(2)",
        "%all = bf16[8,4,16]{2,1,0} parameter(3)", f"ROOT %r = {line}", more=WRITES,
    )  # fmt: skip
    computation = found.computations["main"]
    assert memory_traffic.host_transfer(found, computation["r"], computation) == expected
    (moved,) = [one for one in roofline.analyze(found).operations if one.host_bytes] or [None]
    assert (moved.kind if moved else "", moved.host_bytes if moved else 0) == expected


LOOP = """
%body (t: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %t = (s32[], f32[8,8]) parameter(0)
  %x = f32[8,8]{1,0} get-tuple-element(%t), index=1
  %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(step)/rematted_computation/dot"}
  %c = s32[] get-tuple-element(%t), index=0
  ROOT %r = (s32[], f32[8,8]) tuple(%c, %d)
}
%cond (t: (s32[], f32[8,8])) -> pred[] {
  ROOT %p = pred[] parameter(0)
}
%yes (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="jit(step)/jvp()/dot"}
}
%no (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8]{1,0} parameter(0)
}
"""


def looped() -> parse.Module:
    return module(
        "%x = f32[8,8]{1,0} parameter(0)",
        "%t = (s32[], f32[8,8]) parameter(1)",
        '%w = (s32[], f32[8,8]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}',
        "ROOT %c = f32[8,8]{1,0} conditional(%p, %x, %x), branch_computations={%no, %yes}",
        more=LOOP,
    )


def test_loops_multiply_and_one_branch_runs():
    found = roofline.analyze(looped())
    assert found.flops() == (5 + 1) * 2 * 8**3
    assert found.by("phase", value="flops") == {"remat": 5 * 2 * 8**3, "forward": 2 * 8**3}
    quarter = roofline.analyze(looped(), branch_weights=lambda conditional, seconds: [0.75, 0.25])
    assert quarter.flops() == (5 + 0.25) * 2 * 8**3


def test_an_operation_takes_the_longer_of_computing_and_moving():
    class Rates:
        memory, launch = 1e3, 0.5

        def compute(self, kind: str, dtype: str) -> float:
            return {"tf32": 1e3}[dtype]

    found = roofline.analyze(looped(), Rates())
    assert found.seconds == pytest.approx(6 * (2 * 8**3 / 1e3 + 0.5))
    assert found.by("kind") == {"matmul": pytest.approx(found.seconds)}


TINY = {
    "model.embed": 128, "model.layers": 3, "model.heads": 4, "model.kv_heads": 2, "model.mlp": 256,
    "model.vocab": 4096, "data.sequence": 128,
}  # fmt: skip
CASES = [
    ("fsdp", {"fsdp": 4}, "none", 1),
    ("fsdp", {"fsdp": 4}, "full", 4),
    ("fsdp_tp", {"fsdp": 2, "model": 2}, "full", 1),
]


def expected(config: Config, devices: int) -> float:
    """Hardware FLOPs of a device, with all scores of a sequence: these kernels multiply what is masked too."""
    model, sequence = config.model, config.data.sequence
    assert model.vocab is not None
    terms, head = layer_matmuls(model, sequence), 2 * model.embed * model.vocab
    again = head + model.layers * sum(terms[name] for name in recomputed(model, config.step.remat))
    token = 3 * (head + model.layers * sum(terms.values())) + again
    return token * config.data.global_batch * sequence / devices


@pytest.mark.parametrize(("layout", "mesh", "remat", "accumulate"), CASES)
def test_flops_of_steps_on_simulated_devices(layout: str, mesh: dict, remat: str, accumulate: int):
    changes = {**TINY, "precision": "fp32", "step.remat": remat, "step.microbatches": accumulate}
    config = configured(layout, mesh, {**changes, "step.attention": "reference"})
    text = step_program.compile_step(build_program(config, config.model.vocab, jax.devices()[:4])).as_text() or ""
    found = roofline.analyze(text)
    assert found.flops() == pytest.approx(expected(config, 4), rel=0.01)
    assert not any(one.is_unbounded for one in found.operations)
    assert ("remat" in found.by("phase", value="flops")) == (remat == "full")


@pytest.mark.sampled(3)
@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize(("layout", "mesh", "remat", "accumulate"), CASES)
def test_flops_of_steps_on_absent_h100(layout: str, mesh: dict, remat: str, accumulate: int):
    assert LLAMA["step.attention"] == "xla"
    config = configured(layout, mesh, {**TINY, "step.remat": remat, "step.microbatches": accumulate})
    found = roofline.analyze(compile.compile_report(config, None, H100).text)
    assert found.flops() == pytest.approx(expected(config, 4), rel=0.01)
    assert found.by("dtype", value="flops").keys() <= {"bf16", "tf32"}
