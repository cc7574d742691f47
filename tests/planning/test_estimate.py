"""Estimates against compiled steps: bytes of the state exactly, communication, and the order of layouts."""

from __future__ import annotations

from math import prod

import jax
import pytest
from wire_theory import configured, measured, together

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.errors import UserError
from jaxtrain.hlo import parse
from jaxtrain.kernels.attention import cudnn
from jaxtrain.planning import compile, step_program
from jaxtrain.planning.choices import LayoutChoice, SearchSpace
from jaxtrain.planning.cost import estimate as formulas
from jaxtrain.planning.cost import memory
from jaxtrain.planning.cost.estimate import CostModel, ScheduleEffect
from jaxtrain.planning.cost.parameters import ParameterSharding
from jaxtrain.planning.hardware import targets
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.layout import resolve_layout

H100 = "h100:2x8"
NO_COMPILER = targets.missing_packages(targets.parse(H100), "xla")
NO_CUDNN = targets.missing_packages(targets.parse(H100), "auto")
SCALARS = 64  # bytes: counters of steps
SMALL = {
    "model.embed": 64, "model.layers": 4, "model.heads": 8, "model.kv_heads": 4, "model.mlp": 128, "model.vocab": 1024,
    "data.sequence": 64,
}  # fmt: skip


def formula(config: Config, target: str) -> CostModel:
    where = targets.parse(target)
    assert config.model.vocab is not None
    return CostModel(SearchSpace(config, where.devices or 1, config.model.vocab), where)


GPT2 = {
    "model.activation": "gelu", "model.biases": "[qkv, output, mlp]",
    "model.norm": "layernorm", "model.tie_embeddings": True,
    "model.learned_positions": 512,
}  # fmt: skip
STATES = [
    ("fsdp_tp", {"fsdp": 2, "model": 4}, {"optimizer.name": "muon", **GPT2}),
    ("zero2", {"data": 4, "model": 2}, GPT2),
    ("fsdp", {"fsdp": 8}, {}),
    ("zero1", {"data": 4, "model": 2}, {"step.microbatches": 2}),
    ("zero2", {"data": 8}, {"optimizer.name": "lion"}),
    ("zero3", {"data": 8}, {"precision": "bf16_pure"}),
    ("hsdp", {"data": 2, "fsdp": 4}, {"step.microbatches": 2}),
    ("fsdp_tp", {"fsdp": 2, "model": 4}, {"optimizer.ema_decay": 0.9}),
    ("cp_ulysses", {"fsdp": 2, "context": 4}, {"model.tie_embeddings": True}),
    ("ep_tp", {"fsdp": 2, "expert": 2, "model": 2},
     {"model.moe": "{num_experts: 4, top_k: 2, shared_experts: 1, bias_update_rate: 0.1}"}),
    ("pp_fsdp", {"pipeline": 2, "fsdp": 4}, {"step.microbatches": 4, "optimizer.name": "muon"}),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "mesh", "changes"), STATES)
def test_bytes_of_the_state_are_exact(layout: str, mesh: dict[str, int], changes: dict):
    config = configured(layout, mesh, {**SMALL, **changes})
    program = build_program(config, config.model.vocab, jax.devices()[:8])
    state, held = memory.state_bytes(program.state), step_program.weight_and_gradient_bytes(program)
    sizes = {axis: resolve_layout(config.layout, config.mesh, config.rules, 8).sizes[axis] for axis in AXES}
    assert config.model.vocab is not None
    workload = SearchSpace(config, 8, config.model.vocab).workload
    found = ParameterSharding(workload, sizes, config.rules, config.zero, config.step.microbatches).sizes()
    assert found.params == state["params"]
    rest = sum(size for part, size in state.items() if part != "params")
    assert 0 <= rest - found.optimizer <= SCALARS
    assert found.gradients == held["gradients"]
    assert found.copies == held["weights"] or sizes["model"] > 1  # heads repeated for use count as copies too
    assert found.gathered == held["gathered"]


@pytest.mark.sampled(3)
@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("layout", together(["ddp", "fsdp", "tp_sp", "cp_ulysses"]))
def test_bytes_on_the_wire_are_the_compiled_step_s(layout: str):
    config, sizes, rows = measured(layout, H100)
    found = formula(config, H100).estimate(LayoutChoice.from_config(config, sizes))
    assert found is not None
    assert found.wire_bytes == pytest.approx(sum(row.bytes for row in rows), rel=0.02)
    by_axes = {row.axes_text for row in rows if row.bytes > 1e6}
    assert by_axes <= {row.axes for row in found.traffic}


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("layout", ["fsdp", "tp_sp"])
def test_learned_positions_send_their_rows(layout: str):
    """Beside the same model without them, whose table of tokens is a head too."""
    options = {**GPT2, "data.sequence": 512}

    def both(more: dict) -> tuple[float, float]:
        config, sizes, rows = measured(layout, H100, **more)
        found = formula(config, H100).estimate(LayoutChoice.from_config(config, sizes))
        assert found is not None
        return found.wire_bytes, sum(row.bytes for row in rows)

    with_them, without = both(options), both({**options, "model.learned_positions": "null"})
    assert with_them[0] - without[0] == pytest.approx(with_them[1] - without[1], rel=0.05)
    assert with_them[0] == pytest.approx(with_them[1], rel=0.03)


MEDIUM = {**SMALL, "model.embed": 128, "model.mlp": 512, "data.sequence": 256, "precision": "fp32"}
TEMPORARIES = [
    ("pp_fsdp", {"pipeline": 2}, {"step.microbatches": 4, "pipeline.schedule": "1f1b"}),
    ("pp_fsdp", {"pipeline": 2}, {"step.microbatches": 4, "pipeline.schedule": "gpipe"}),
    ("cp_gather", {"fsdp": 2, "context": 2}, {"data.sequence": 1024}),  # of more than two blocks: no scores are kept
]  # fmt: skip


@pytest.mark.parametrize(("layout", "mesh", "changes"), TEMPORARIES)
def test_what_layers_keep_is_about_what_a_compiled_step_does(layout: str, mesh: dict[str, int], changes: dict):
    config = configured(layout, {"fsdp": 1, **mesh}, {**MEDIUM, **changes, "step.remat": "none"})
    devices = prod(mesh.values())
    program = build_program(config, config.model.vocab, jax.devices()[:devices])
    made = memory.compiled_memory(step_program.compile_step(program)).temporaries
    found = formula(config, f"simulate:{devices}").estimate(LayoutChoice.from_config(config, program.layout.sizes))
    assert found is not None
    assert sum(found.memory[kind] for kind in ("gradients", "gathered", "activations")) == pytest.approx(made, rel=0.2)


@pytest.mark.sampled(3)
@pytest.mark.skipif(NO_CUDNN is not None, reason=str(NO_CUDNN))
@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", "none"), ("gpipe", "none"), ("zb_h1", "full")])
def test_what_stages_keep_is_about_what_is_compiled_for_gpus(schedule: str, remat: str):
    sizes = {"model.embed": 1024, "model.layers": 8, "model.mlp": 4096, "model.vocab": 32000, "data.sequence": 2048}
    own = {"step.microbatches": 8, "data.global_batch": 16, "step.remat": remat, "pipeline.schedule": schedule}
    config = configured("pp_fsdp", {"pipeline": 4, "fsdp": 1}, {**SMALL, **sizes, **own, "step.attention": "auto"})
    report = compile.compile_report(config, None, "h100:1x4")
    known, choice = formula(config, "h100:1x4"), LayoutChoice.from_config(config, report.sizes)
    found, wanted = known.estimate(choice), memory.attention_workspace(parse.parse(report.text))
    assert found is not None
    assert known.workspace(choice, known.sizes(choice)) == wanted > 0
    made = report.memory.temporaries
    assert sum(found.memory[kind] for kind in ("gradients", "gathered", "activations")) == pytest.approx(made, rel=0.1)


def llama(**changes) -> CostModel:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    model = {
        "model.embed": 4096, "model.layers": 32, "model.heads": 32, "model.kv_heads": 8, "model.mlp": 14336,
        "model.vocab": 128256, "data.sequence": 4096, "precision": "bf16", "step.attention": "auto",
    }  # fmt: skip
    config = configured("fsdp", {"fsdp": 64}, {**model, **keys, "data.global_batch": 128})
    return formula(config, "h100:8x8")


def sized(**sizes: int) -> tuple[int, ...]:
    return tuple(sizes.get(axis, 1) for axis in AXES)


def test_places_of_documents_are_the_kernel_s():
    for time in (1024, 8192, 65536):
        assert max(formulas.MIN_DOCUMENTS, time // formulas.TOKENS_PER_DOCUMENT) == cudnn._run_limits(time)[-1]
    assert cudnn.HOPPER[0] == formulas.HOPPER


def test_figures_of_llama_3_8b_on_64_gpus():
    known, choice = llama(), LayoutChoice(sized(fsdp=64), remat="full")
    found = known.estimate(choice)
    assert found is not None
    assert known.workspace(choice, known.sizes(choice)) == 4 * 16 * 2 * 4096 * 4096  # 16 documents a row
    assert found.memory["params"] + found.memory["optimizer"] == pytest.approx(1.509e9, rel=0.001)
    assert found.wire_bytes == pytest.approx(44.6e9, rel=0.01)  # as pinned of the compiled step
    assert 0.4 < 8.03e9 * 6 * 128 * 4096 / 64 / 989.4e12 / found.step_seconds < 0.6


def test_the_order_of_layouts_is_sane():
    seconds = llama()

    def step_seconds(*args, **kwargs) -> float:
        found = seconds.estimate(LayoutChoice(*args, **kwargs))
        assert found is not None
        return found.step_seconds

    fsdp = step_seconds(sized(fsdp=64))
    # Recomputing, tensor parallelism, and tensor parallelism across nodes cost more and more.
    assert fsdp < step_seconds(sized(fsdp=64), remat="full") < step_seconds(sized(fsdp=8, model=8), remat="full")
    assert 1.4 * step_seconds(sized(fsdp=8, model=8)) < step_seconds(sized(fsdp=4, model=16))
    # Every microbatch gathers all weights anew.
    assert fsdp < step_seconds(sized(fsdp=64), microbatches=2)
    # 1F1B waits longer than its aligned form in lockstep, gathers apart.
    stages = {"sizes": sized(pipeline=4, fsdp=16), "microbatches": 8, "remat": "full"}
    assert step_seconds(**stages, schedule="1f1b_aligned") < step_seconds(**stages, schedule="1f1b")


def test_memory_falls_with_remat_stages_and_zero():
    known = llama()

    def needs(*args, **kwargs) -> float:
        found = known.estimate(LayoutChoice(*args, **kwargs))
        assert found is not None
        return found.needs

    mesh = sized(fsdp=64)
    assert needs(mesh, remat="full") < needs(mesh, remat=("attention",)) < needs(mesh, remat="none")
    stream = 32 * 2 * 4096 * 4096 * 2  # layers, rows, tokens, width, bytes
    away = needs(mesh, remat="full") - needs(mesh, remat="full", offload=("input",))
    assert away == pytest.approx(stream)
    replicas = sized(data=64)
    assert needs(replicas, zero=3) < needs(replicas, zero=1) < needs(replicas)
    stages = {"sizes": sized(pipeline=4, fsdp=16), "microbatches": 8}
    assert needs(**stages, schedule="1f1b") < needs(**stages, schedule="gpipe")


def test_bounds_are_below_what_they_bound():
    known = llama()
    choices = [one for one in known.space if one.size("pipeline") in (2, 4) and one.size("fsdp") == 16]
    for choice in choices[::37]:
        exact = known.estimate(choice)
        if exact is not None:
            bound = known.lower_bound(choice)
            assert bound.step_seconds <= exact.step_seconds * (1 + 1e-9), choice
            assert bound.needs <= exact.needs * (1 + 1e-9), choice
    assert ScheduleEffect.lower_bound(LayoutChoice(mesh := sized(fsdp=64))).ticks == 0, mesh


def test_other_models_have_no_formulas():
    config = configured("ddp", {"data": 8}, {"data.sequence": 64})
    own = config.model_copy(update={"model": type(config.model)(type="package.module:Class")})
    with pytest.raises(UserError, match="built-in decoder"):
        CostModel(SearchSpace(own, 8, 1024), targets.parse("simulate:8"))
