"""The ways that a search looks at: legal, each once, all kinds of them, and none that changes results."""

from __future__ import annotations

import random

import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.resolve import resolve
from jaxtrain.planning import legal
from jaxtrain.planning.choices import Choice, Space, microbatches
from jaxtrain.sharding.axes import AXES

VOCAB = 1024
TINY = (
    "model.embed=64", "model.layers=4", "model.heads=8", "model.kv_heads=4", "model.mlp=128", "data.sequence=64",
    "data.global_batch=32", f"model.vocab={VOCAB}",
)  # fmt: skip


def tiny(*changes: str) -> Config:
    return resolve(None, "layout=ddp", *TINY, *changes, paths=False)[0]


@pytest.fixture(scope="module")
def space() -> Space:
    return Space(tiny(), 8, VOCAB)


@pytest.fixture(scope="module")
def choices(space: Space) -> list[Choice]:
    return list(space)


def test_what_is_looked_at_is_legal(space: Space, choices: list[Choice]):
    assert len(choices) > 1000
    with_tables = [one for one in choices if one.size("pipeline") == 1 or space.table(one) is not None]
    for choice in random.Random(0).sample(with_tables, 60):
        assert legal.problems(space.configured(choice), 8, VOCAB) == [], choice


def test_nothing_is_looked_at_twice(space: Space, choices: list[Choice]):
    assert len(set(choices)) == len(choices)
    some = [one for one in choices if one.remat == "full" and not one.offload]
    seen = {f"{legal.effect(config)} {config.pipeline if config.mesh.pipeline > 1 else ''}"
            for config in map(space.configured, some)}  # fmt: skip
    assert len(seen) == len(some)


def test_nothing_changes_results(space: Space, choices: list[Choice]):
    kept = ("model", "data", "optimizer", "loss", "precision", "seed", "steps")
    for choice in random.Random(1).sample(choices, 40):
        config = space.configured(choice)
        assert all(getattr(config, key) == getattr(space.config, key) for key in kept)
        assert config.step.attention == space.config.step.attention


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 8}, {}),
        ({"data": 8}, {"zero": 1}),
        ({"data": 8}, {"zero": 2, "accumulate": 2}),
        ({"data": 8}, {"zero": 3}),
        ({"fsdp": 8}, {"remat": "full", "offload": ("attention",)}),
        ({"fsdp": 8}, {"remat": "full", "offload": ("input",)}),
        ({"data": 2, "fsdp": 4}, {"zero": 1}),
        ({"model": 8}, {"sequence": False}),
        ({"fsdp": 2, "model": 4}, {"accumulate": 4, "remat": ("attention",)}),
        ({"fsdp": 2, "context": 4}, {"context_parallel": "ring"}),
        ({"context": 2, "model": 4}, {"context_parallel": "ulysses"}),
        ({"pipeline": 4, "fsdp": 2}, {"schedule": "zb_h1", "accumulate": 8}),
        ({"pipeline": 2, "data": 2, "model": 2}, {"schedule": "interleaved_1f1b", "chunks": 2, "accumulate": 4}),
    ],
)
def test_all_kinds_are_looked_at(choices: list[Choice], sizes: dict, options: dict):
    mesh = tuple(sizes.get(axis, 1) for axis in AXES)
    assert Choice(mesh, **{"context_parallel": "auto", **options}) in choices


def test_what_cannot_be_is_not_looked_at(space: Space, choices: list[Choice]):
    # Rings wait for all devices; 4 layers do not make 8 stages; one microbatch more than a stage's rows.
    assert not any(one.context == "ring" and one.size("pipeline") > 1 and space.table(one) for one in choices[:4000])
    assert max(one.size("pipeline") for one in choices) == 4
    assert {one.accumulate for one in choices if one.sizes == (1, 1, 8, 1, 1, 1, 1)} == {1, 2, 4}
    assert not any(one.size("expert") > 1 for one in choices)


def test_experts_and_islands():
    moe = tiny("model.moe={num_experts: 4, top_k: 2}", "model.moe.load_balance_loss=0.01")
    found = {one.mesh for one in Space(moe, 8, VOCAB).places()}
    assert {"fsdp 2 x expert 4", "fsdp 4 x expert 2", "fsdp 2 x expert 2 x model 2"} <= found
    islands = Space(tiny().model_copy(update={"mesh": tiny().mesh.model_copy(update={"replica": 2})}), 8, VOCAB)
    assert {sizes[0] for sizes in islands._meshes()} == {2}


def test_what_a_search_does_not_choose_of_a_pipeline_stays():
    space = Space(tiny("pipeline.virtual_stages=2"), 8, VOCAB)
    pipeline = space.configured(Choice((1, 2, 1, 4, 1, 1, 1), schedule="gpipe")).pipeline
    assert (pipeline.schedule, pipeline.virtual_stages) == ("gpipe", None)


def test_slices_are_spanned_by_an_outer_axis():
    space = Space(tiny(), 8, VOCAB, slices=2)
    choice = Choice((1, 1, 1, 4, 1, 1, 2))
    assert space.configured(choice).mesh.dcn == {"fsdp": 2}


def test_microbatches_double():
    assert microbatches(16, 1) == [1, 2, 4, 8, 16]
    assert microbatches(12, 1) == [1, 2, 4, 12]
    assert microbatches(64, 4) == [4, 8, 16, 32]
    assert microbatches(3, 4) == []
