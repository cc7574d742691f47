"""A whole plan: of simulated devices, of absent GPUs, of a step that is too large; and its advice."""

from __future__ import annotations

import dataclasses
import json

import pytest
from test_roofline import H100, NO_COMPILER, TINY, expected
from wire_theory import configured

from jaxtrain.config.schema import Config
from jaxtrain.core.layout_check import check_layout
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import Problem, UserError
from jaxtrain.models.flops import decoder_flops, mean_attended
from jaxtrain.pipeline.schedules.table import Action
from jaxtrain.planning import advice, compile, predict
from jaxtrain.planning.assess import assess
from jaxtrain.planning.cost import pipeline_bubble
from jaxtrain.planning.cost.memory import Memory
from jaxtrain.planning.hardware import calibration, chips, targets
from jaxtrain.planning.report import values
from jaxtrain.planning.result import Plan, Traffic
from jaxtrain.sharding import layout


def json_of(plan: Plan) -> Plan:
    return Plan.from_dict(json.loads(json.dumps(plan.as_dict())))


STAGES = configured("pp_fsdp", {"pipeline": 2, "fsdp": 2}, {
    **TINY, "model.layers": 4, "precision": "fp32", "step.microbatches": 4, "step.attention": "reference",
    "pipeline.schedule": "1f1b",
})  # fmt: skip


pytestmark = pytest.mark.xdist_group("predict")  # one compiled step for all


@pytest.fixture(scope="module")
def report() -> compile.CompileReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")  # with the fusions that are priced
        return compile.compile_report(STAGES, None, "simulate:4")


@pytest.fixture(scope="module")
def simulated(report: compile.CompileReport) -> Plan:
    return assess(STAGES, report)


def test_a_plan_of_simulated_devices_has_times_from_measured_rates(simulated: Plan, report: compile.CompileReport):
    assert (simulated.devices, simulated.sizes["pipeline"], simulated.fits) == (4, 2, None)
    assert report.cpu_rates is not None
    assert min(report.cpu_rates.values()) > 0
    assert simulated.compute_seconds is not None
    assert simulated.compute_seconds > simulated.flops_compiled / report.cpu_rates["flops"]
    assert {row.axes for row in simulated.traffic} >= {"fsdp", "pipeline"}
    assert {row.network for row in simulated.traffic} == {"host"}
    # Nothing hides copies through the host's memory, and stages that wait leave the cores to the others.
    exposed = sum(row.seconds for row in simulated.traffic)
    assert simulated.step_seconds == pytest.approx(simulated.compute_seconds + exposed)
    assert simulated.bubble_seconds == 0
    assert json_of(simulated) == simulated


def test_half_the_rates_are_twice_the_time(simulated: Plan, report: compile.CompileReport):
    halved = {key: value * (2 if key in ("launch", "barrier") else 0.5) for key, value in report.cpu_rates.items()}
    slower = assess(STAGES, dataclasses.replace(report, cpu_rates=halved))
    assert slower.step_seconds == pytest.approx(2 * simulated.step_seconds)


def test_large_temporaries_are_allocated_in_every_step(simulated: Plan, report: compile.CompileReport):
    size = 40_000_000  # more than malloc keeps
    large = dataclasses.replace(report, memory=dataclasses.replace(report.memory, temporaries=size))
    plan = assess(STAGES, large)
    assert report.cpu_rates is not None
    assert plan.seconds_by["kind"]["pages"] == plan.seconds_by["phase"]["pages"] == size / report.cpu_rates["pages"]
    assert plan.step_seconds == pytest.approx(simulated.step_seconds + size / report.cpu_rates["pages"])
    assert "pages" not in simulated.seconds_by["kind"]
    gpu = dataclasses.replace(large, cpu_rates=None, target="local", device_kind="NVIDIA H100 80GB HBM3")
    assert "pages" not in assess(STAGES, gpu).seconds_by["kind"]


def test_a_stage_computes_its_share_of_the_actions(simulated: Plan):
    assert simulated.flops_compiled == pytest.approx(expected(STAGES, 4), rel=0.01)


def test_a_lockstep_bubble_from_the_seconds_of_the_actions(report: compile.CompileReport):
    h100 = dataclasses.replace(report, cpu_rates=None, target="local", device_kind="NVIDIA H100 80GB HBM3")
    plan = assess(STAGES, h100)
    # 2 stages, 4 microbatches: (p - 1) / m of the work without lockstep, and more with it.
    assert 0.1 * plan.compute_seconds < plan.bubble_seconds < plan.compute_seconds


def test_bytes_by_kind_add_up(simulated: Plan):
    kinds = {kind: size for kind, size in simulated.memory.items() if kind != "host"}
    assert sum(kinds.values()) == pytest.approx(simulated.needs, rel=0.01)
    assert simulated.memory["optimizer"] == pytest.approx(2 * simulated.memory["params"], rel=0.01)
    assert simulated.tensors[0][0].startswith("opt_state/")
    assert simulated.buffers[0][2] >= simulated.buffers[-1][2] > 0


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
def test_a_plan_of_absent_gpus():
    config = configured("fsdp", {"fsdp": 4}, {**TINY, "model.embed": 512, "model.mlp": 1024, "step.remat": "full"})
    plan = predict.predict(config, None, H100)
    assert plan.fits is True
    assert plan.crosses == {"fsdp": False}
    assert {row.network for row in plan.traffic} == {"NVLink"}
    assert plan.step_seconds is not None
    assert plan.compute_seconds is not None
    exposed = sum(row.exposed for row in plan.traffic)
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + exposed)
    assert plan.mfu is not None
    assert 0 < plan.mfu < calibration.calibration_of("h100").matmul
    per_token = decoder_flops(config.model, 4096, 128, "full").model
    assert plan.mfu == pytest.approx(per_token * plan.tokens / 4 / plan.step_seconds / chips.GPUS["h100"].flops("bf16"))
    assert plan.days == pytest.approx(plan.step_seconds * 1000 / 86400)
    assert plan.device_hours == pytest.approx(plan.step_seconds * 1000 / 3600 * 4)
    assert json_of(plan) == plan
    copies = plan.seconds_by["kind"].get("copy", 0.0)  # overlap with what leaves bandwidth unused
    for kind in plan.seconds_by.values():
        assert plan.compute_seconds * 0.99 < sum(kind.values()) < plan.compute_seconds * 1.01 + copies
    for kind in plan.flops_by.values():
        assert sum(kind.values()) == pytest.approx(plan.flops_compiled)
    assert plan.bytes_by["kind"]["matmul"] > 0
    assert sum(plan.bytes_by["part"].values()) == pytest.approx(sum(plan.bytes_by["kind"].values()))


def test_a_step_that_does_not_fit_or_compile_is_a_plan(monkeypatch):
    config = configured("fsdp", {"fsdp": 8}, {"step.remat": "none"})

    def too_large(*args, **kwargs):
        raise compile.StepTooLarge("needs more", 10**12)

    monkeypatch.setattr(compile, "compile_report", too_large)
    plan = predict.predict(config, None, "h100:8")
    assert (plan.fits, plan.reason, plan.needs, plan.sizes["fsdp"]) == (False, "needs more", 10**12, 8)
    assert json_of(plan) == plan

    def crash(*args, **kwargs):
        raise compile.CompileCrashed("compiling ended with status -11")

    monkeypatch.setattr(compile, "compile_report", crash)
    plan = predict.predict(config, None, "h100:8")
    assert (plan.compiled, plan.fits, plan.reason, plan.advice) == (False, None, "compiling ended with status -11", ())
    assert plan.bottleneck == "not compiled: compiling ended with status -11"
    assert values.verdict(plan) == ("not compiled", plan.reason)
    assert json_of(plan) == plan

    def wrong(*args, **kwargs):
        raise UserError("mesh: does not fit")

    monkeypatch.setattr(compile, "compile_report", wrong)
    with pytest.raises(UserError, match="does not fit"):
        predict.predict(config, None, "h100:8")


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("Ran out of memory in memory space hbm. Used 20.12G of 15.75G hbm.", 20.12 * 2**30),
        ("the total memory required for HLO temporaries (400.00G) exceeds available HBM (95.74G)", 400 * 2**30),
        ("out of memory", None),
    ],
)
def test_bytes_in_out_of_memory_messages(message: str, size: float | None):
    assert compile.out_of_memory_bytes(message) == (None if size is None else round(size))


def plan(**changes) -> Plan:
    sizes = dict.fromkeys(("replica", "pipeline", "data", "fsdp", "expert", "context", "model"), 1) | {"fsdp": 8}
    gather = Traffic("fsdp", "all-gather", "NVLink", 10, 10**9, 0.3, 0.1)
    values = {
        "target": "h100:1x8", "device": "H100", "devices": 8, "layout": "fsdp", "sizes": sizes, "fits": True,
        "needs": 20 * 10**9, "usable": 79 * 10**9, "memory": {"activations": 10**10}, "traffic": (gather,),
        "compute_seconds": 0.8, "exposed_seconds": 0.2, "step_seconds": 1.0,
        "seconds_by": {"phase": {"remat": 0.2}, "kind": {"matmul": 0.6, "elementwise": 0.2}},
    }  # fmt: skip
    return Plan(**(values | changes))


def test_advice_is_ordered_by_gain_and_has_numbers(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    config = configured("fsdp", {"fsdp": 8}, {"step.remat": "full"})
    first, second = advice.suggest(config, plan())
    assert first.gain >= second.gain > 0
    assert {first.change, second.change} == {"step.remat=none", "XLA_FLAGS=" + advice.LATENCY_HIDING}
    assert first.gain == pytest.approx(0.25)  # 0.2 of 1.0 s saved
    full = advice.suggest(config, plan(needs=79 * 10**9 - 10**6))
    assert [one.change for one in full] == ["XLA_FLAGS=" + advice.LATENCY_HIDING]
    monkeypatch.setenv("XLA_FLAGS", advice.LATENCY_HIDING)
    assert [one.change for one in advice.suggest(config, plan())] == ["step.remat=none", "data.global_batch=32"]


def test_advice_for_collectives_that_a_tpu_waits_for(monkeypatch):
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    config = configured("fsdp", {"fsdp": 64}, {"step.remat": "none"})
    rows = tuple(Traffic("fsdp", op, "ICI", 10, 10**9, 0.15, 0.05) for op in ("all-gather", "all-reduce"))
    waits = {"target": "v5p:4x4x4", "device": "TPU v5", "devices": 64, "traffic": rows, "usable": None}
    (only,) = advice.suggest(config, plan(**waits))
    assert only.change.startswith("LIBTPU_INIT_ARGS=")
    assert only.gain == pytest.approx(0.13 / 0.87)  # of 0.1 s each 0.8 and 0.5
    monkeypatch.setenv("LIBTPU_INIT_ARGS", advice.ASYNC_COLLECTIVES)
    assert not advice.suggest(config, plan(**waits))


def test_advice_for_an_axis_that_leaves_its_node():
    config = configured("fsdp_tp", {"fsdp": 2, "model": 16}, {"step.remat": "none"})
    sizes = plan().sizes | {"fsdp": 2, "model": 16}
    slow = Traffic("model", "all-gather", "NVLink+InfiniBand", 10, 10**9, 0.5, 0.0)
    found = advice.suggest(config, plan(
        target="h100:4x8", devices=32, sizes=sizes, crosses={"fsdp": True, "model": True}, traffic=(slow,),
        exposed_seconds=0.5,
    ))  # fmt: skip
    assert found[0].change == "mesh.model=8 mesh.fsdp=4"
    assert found[0].gain == pytest.approx(0.5 * (1 - 1 / 9) / (1 - 0.5 * (1 - 1 / 9)))


def test_advice_for_pipelines_and_for_steps_that_do_not_fit():
    config = configured(
        "pp", {"pipeline": 4}, {"step.remat": "none", "step.microbatches": 8, "pipeline.schedule": "1f1b"}
    )
    schedule = pipeline_bubble.schedule_table(config.pipeline, 4, 8)
    assert schedule is not None
    runs = pipeline_bubble.loop_runs_per_tick(schedule)
    assert sum(runs[action.name] for action in Action) == pytest.approx(1)
    assert runs["embed"] == pytest.approx(8 / schedule.ticks)
    sizes = plan().sizes | {"fsdp": 1, "pipeline": 4}
    found = advice.suggest(config, plan(sizes=sizes, traffic=(), exposed_seconds=0.0, bubble_seconds=0.3))
    assert found[0].change == "step.microbatches=16"
    assert 0 < found[0].gain < 0.3
    small = advice.suggest(configured("fsdp", {"fsdp": 8}, {"step.remat": "none"}), plan(fits=False, step_seconds=None))
    assert [one.change for one in small] == ["step.remat=full", "step.microbatches=2"]


def test_bottleneck():
    assert advice.bottleneck(plan()) == "matrix multiplications: 60% of the step"
    waiting = plan(exposed_seconds=0.9, step_seconds=1.7)
    assert advice.bottleneck(waiting).endswith("53% of the step, most of it all-gather over fsdp (NVLink)")
    assert "does not fit" in advice.bottleneck(plan(fits=False, reason="too big"))
    assert dataclasses.replace(plan(), step_seconds=None).days is None


SMALL = (
    "model.embed=64", "model.layers=4", "model.mlp=128", "model.vocab=256", "data.sequence=64", "step.attention=xla",
)  # fmt: skip
# Target, keys, and a change that would not be legal.
ADVISED = [
    ("h100:1x4", "layout=ddp mesh.data=4 model.heads=4 data.global_batch=8 step.microbatches=2", "model=8"),
    ("h100:1x4", "layout=zero1 mesh.data=4 model.heads=6 model.embed=96 data.global_batch=4", "model=4"),
    ("h100:1x4", "layout=pp mesh.pipeline=4 mesh.data=1 model.heads=8 data.global_batch=8 step.microbatches=8",
     "step.microbatches=16"),
    ("h100:1x4", "layout=pp mesh.pipeline=4 mesh.data=1 model.heads=8 data.global_batch=16 step.microbatches=8",
     "step.microbatches=4"),
    ("h100:1x8", "layout=fsdp model.heads=8 data.global_batch=24 step.microbatches=3", "step.microbatches=1"),
    ("h100:4x8", "layout=fsdp_tp mesh.fsdp=2 mesh.model=16 model.heads=16 data.global_batch=8", "mesh.model=8'"),
    ("h100:4x8", "layout=fsdp_tp mesh.model=16 model.heads=16 data.global_batch=8", "mesh.fsdp"),
    ("v5e:4x4", "layout=hsdp mesh.data=2 model.heads=12 model.embed=96 data.global_batch=16", "model=8"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "keys", "never"), ADVISED)
@pytest.mark.parametrize("fits", [True, False])
def test_every_advice_is_a_config_that_runs(target: str, keys: str, never: str, fits: bool):
    words, devices = [*SMALL, *keys.split()], targets.parse(target).devices or 0

    def check(config: Config) -> list[Problem]:
        return check_layout(config, devices)

    for remat in ("none", "full"):
        config, _ = resolve(None, *words, f"step.remat={remat}", paths=False, checks=[check])
        sizes = layout.resolve_layout(config.layout, config.mesh, config.rules, devices).sizes
        rows = tuple(Traffic(axis, "all-gather", "InfiniBand", 10, 10**9, 0.2, 0.0) for axis in ("fsdp", "model"))
        made = plan(
            target=target, devices=devices, sizes=sizes, fits=fits, traffic=rows, bubble_seconds=0.3,
            exposed_seconds=0.4, step_seconds=1.5 if fits else None,
            crosses={axis: size > 8 for axis, size in sizes.items() if size > 1},
        )  # fmt: skip
        found = advice.suggest(config, made)
        assert found or fits
        for one in found:
            assert never not in repr(one.change)
            if not one.change.startswith(("XLA_FLAGS", "LIBTPU_INIT_ARGS")):
                resolve(None, *words, f"step.remat={remat}", *one.change.split(), paths=False, checks=[check])


def test_no_less_remat_if_values_are_offloaded():
    config = configured("fsdp", {"fsdp": 8}, {"step.remat": "full"})
    offloads = config.model_copy(update={"step": config.step.model_copy(update={"remat_save": {"attention": "host"}})})
    assert "step.remat=none" in [one.change for one in advice.suggest(config, plan())]
    assert not any(one.change.startswith("step.remat") for one in advice.suggest(offloads, plan()))


def test_a_tpus_memory_is_not_that_of_its_host(report: compile.CompileReport):
    """libtpu's peak, beside the arguments, is of whichever holds more."""
    giga, usable = 10**9, int(chips.CHIPS["v6e"].usable.value)
    arguments = sum(report.state_bytes.values())

    def planned(host: int, peak: int, temporaries: int = 9 * giga) -> tuple[int, bool]:
        planned_memory = Memory(arguments, arguments, arguments, temporaries, arguments + peak, host)
        plan = assess(STAGES, dataclasses.replace(report, target="v6e:2x2", memory=planned_memory, cpu_rates=None))
        assert plan.fits
        assert plan.memory["host"] == host
        return plan.needs, any("device memory is an upper bound" in note for note in plan.notes)

    assert planned(0, 8 * giga) == (arguments + 8 * giga, False)
    assert planned(7 * giga, 8 * giga) == (arguments + 8 * giga, False)
    assert planned(8 * giga, 8 * giga) == (arguments + 9 * giga, True)
    assert planned(100 * giga, 100 * giga, 90 * giga) == (usable, True)  # it compiled, so it fits


def test_advice_to_offload_kept_activations():
    large = plan(fits=False, step_seconds=None)
    keys = {"step.remat": "full", "data.global_batch": 8}  # one row a device: no smaller microbatch

    def first(saved: dict[str, str]) -> str:
        config = configured("fsdp", {"fsdp": 8}, {**keys, "step.remat_save": json.dumps(saved)})
        return advice.suggest(config, large)[0].change

    assert first({}) == "step.remat_save.input=host"
    assert first({"q": "host"}) == "step.remat_save.input=host"
    assert "remat_save" not in first({"input": "host"})


def test_layers_with_and_without_a_window_are_averaged():
    gemma, _ = resolve("configs/models/gemma2_9b.yaml", "data.sequence=16384", paths=False)
    near = 4096 - 4096 * 4095 / 2 / 16384
    assert mean_attended(gemma.model, 16384) == pytest.approx((near + 16385 / 2) / 2)
