"""Layout choices of a search: legal, each once, of all kinds, and none changes the result."""

from __future__ import annotations

import random

import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.resolve import resolve
from jaxtrain.planning.choices import LayoutChoice, SearchSpace, microbatch_counts
from jaxtrain.planning.cost.estimate import CostModel
from jaxtrain.planning.hardware import targets
from jaxtrain.sharding.axes import AXES
from jaxtrain.verification.candidates import layout_key, layout_problems

VOCAB = 1024
TINY = (
    "model.embed=64", "model.layers=4", "model.heads=8", "model.kv_heads=4", "model.mlp=128", "data.sequence=64",
    "data.global_batch=32", f"model.vocab={VOCAB}",
)  # fmt: skip


def tiny(*changes: str) -> Config:
    return resolve(None, "layout=ddp", *TINY, *changes, paths=False)[0]


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace(tiny(), 8, VOCAB)


@pytest.fixture(scope="module")
def choices(space: SearchSpace) -> list[LayoutChoice]:
    return list(space)


def test_choices_are_legal(space: SearchSpace, choices: list[LayoutChoice]):
    assert len(choices) > 1000
    with_tables = [one for one in choices if one.size("pipeline") == 1 or space.schedule_table(one) is not None]
    for choice in random.Random(0).sample(with_tables, 60):
        assert layout_problems(space.to_config(choice), 8, VOCAB) == [], choice


def test_choices_are_unique(space: SearchSpace, choices: list[LayoutChoice]):
    assert len(set(choices)) == len(choices)
    some = [one for one in choices if one.remat == "full" and not one.offload]
    seen = {f"{layout_key(config)} {config.pipeline if config.mesh.pipeline > 1 else ''}"
            for config in map(space.to_config, some)}  # fmt: skip
    assert len(seen) == len(some)


def test_choices_keep_what_determines_the_result(space: SearchSpace, choices: list[LayoutChoice]):
    kept = ("model", "data", "optimizer", "loss", "precision", "seed", "steps")
    for choice in random.Random(1).sample(choices, 40):
        config = space.to_config(choice)
        assert all(getattr(config, key) == getattr(space.config, key) for key in kept)
        assert config.step.attention == space.config.step.attention


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 8}, {}),
        ({"data": 8}, {"zero": 1}),
        ({"data": 8}, {"zero": 2, "microbatches": 2}),
        ({"fsdp": 8}, {"remat": "full", "offload": ("attention",)}),
        ({"fsdp": 8}, {"remat": "full", "offload": ("input",)}),
        ({"data": 2, "fsdp": 4}, {"zero": 1}),
        ({"model": 8}, {"sequence_parallel": False}),
        ({"fsdp": 2, "model": 4}, {"microbatches": 4, "remat": ("attention",)}),
        ({"fsdp": 2, "context": 4}, {"context_parallel": "ring"}),
        ({"context": 2, "model": 4}, {"context_parallel": "ulysses"}),
        ({"pipeline": 4, "fsdp": 2}, {"schedule": "zb_h1", "microbatches": 8}),
        (
            {"pipeline": 2, "data": 2, "model": 2},
            {"schedule": "interleaved_1f1b", "virtual_stages": 2, "microbatches": 4},
        ),
    ],
)
def test_choices_of_all_kinds_are_listed(choices: list[LayoutChoice], sizes: dict, options: dict):
    mesh = tuple(sizes.get(axis, 1) for axis in AXES)
    assert LayoutChoice(mesh, **{"context_parallel": "auto", **options}) in choices


def test_stage_3_is_not_listed_beside_fsdp(space: SearchSpace, choices: list[LayoutChoice]):
    """They are one layout, but for how small tensors such as the norms' are sharded."""
    assert not any(choice.zero == 3 for choice in choices)
    mesh = {axis: tuple(8 if one == axis else 1 for one in AXES) for axis in ("data", "fsdp")}
    both = (LayoutChoice(mesh["data"], zero=3), LayoutChoice(mesh["fsdp"]))
    target = targets.parse("h100:1x8")
    stage_3, fsdp = (CostModel(space, target).estimate(choice) for choice in both)
    assert stage_3.needs == pytest.approx(fsdp.needs, rel=2e-3)
    assert stage_3.wire_bytes == pytest.approx(fsdp.wire_bytes, rel=2e-3)


def test_impossible_choices_are_not_listed(space: SearchSpace, choices: list[LayoutChoice]):
    # Rings wait for all devices; 4 layers do not make 8 stages; one microbatch more than a stage's rows.
    assert not any(
        one.context_parallel == "ring" and one.size("pipeline") > 1 and space.schedule_table(one)
        for one in choices[:4000]
    )
    assert max(one.size("pipeline") for one in choices) == 4
    assert {one.microbatches for one in choices if one.sizes == (1, 1, 8, 1, 1, 1, 1)} == {1, 2, 4}
    assert not any(one.size("expert") > 1 for one in choices)


def test_experts_and_replicas():
    moe = tiny("model.moe={num_experts: 4, top_k: 2}", "model.moe.load_balance_loss=0.01")
    found = {one.mesh for one in SearchSpace(moe, 8, VOCAB).mesh_choices()}
    assert {"fsdp 2 x expert 4", "fsdp 4 x expert 2", "fsdp 2 x expert 2 x model 2"} <= found
    replicas = SearchSpace(tiny().model_copy(update={"mesh": tiny().mesh.model_copy(update={"replica": 2})}), 8, VOCAB)
    assert {sizes[0] for sizes in replicas._meshes()} == {2}


def test_an_unset_number_of_virtual_stages_stays_unset():
    space = SearchSpace(tiny("pipeline.virtual_stages=2"), 8, VOCAB)
    pipeline = space.to_config(LayoutChoice((1, 2, 1, 4, 1, 1, 1), schedule="gpipe")).pipeline
    assert (pipeline.schedule, pipeline.virtual_stages) == ("gpipe", None)


def test_slices_are_spanned_by_an_outer_axis():
    space = SearchSpace(tiny(), 8, VOCAB, slices=2)
    choice = LayoutChoice((1, 1, 1, 4, 1, 1, 2))
    assert space.to_config(choice).mesh.dcn == {"fsdp": 2}


def test_microbatches_double():
    assert microbatch_counts(16, 1) == [1, 2, 4, 8, 16]
    assert microbatch_counts(12, 1) == [1, 2, 4, 12]
    assert microbatch_counts(64, 4) == [4, 8, 16, 32]
    assert microbatch_counts(3, 4) == []
