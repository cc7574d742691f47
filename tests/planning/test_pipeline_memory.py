"""What pipeline stages keep: as much as the schedule's table says, however many microbatches a step has."""

from __future__ import annotations

import functools

import jax

from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.hlo import parse
from jaxtrain.hlo.collectives import divergent_permutes
from jaxtrain.planning import step_program
from jaxtrain.planning.cost import memory

SIZES = (
    "mesh.pipeline=4", "mesh.fsdp=1", "data.sequence=256", "model.embed=64", "model.layers=4", "model.heads=2",
    "model.kv_heads=2", "model.mlp=128", "model.vocab=256", "precision=fp32", "step.remat=full", "loss.vocab_chunks=4",
)  # fmt: skip
ACTIVATION = 8 * 256 * 64 * 4  # bytes of a microbatch of 8 rows


@functools.cache
def compiled(schedule: str, microbatches: int) -> jax.stages.Compiled:
    own = (
        f"pipeline.schedule={schedule}",
        f"step.microbatches={microbatches}",
        f"data.global_batch={8 * microbatches}",
    )
    config = resolve(None, "layout=pp_fsdp", *SIZES, *own, paths=False)[0]
    return step_program.compile_step(build_program(config, 256, jax.devices()[:4]))


def temporaries(schedule: str, microbatches: int) -> int:
    return memory.compiled_memory(compiled(schedule, microbatches)).temporaries


def test_no_ring_is_copied_and_no_permutation_is_left_to_some_stages():
    """What is kept is written in place: a ring is 5 slots of a microbatch of 8 rows, of one layer."""
    text = compiled("1f1b", 4).as_text()
    assert divergent_permutes(text) == []
    module = parse.parse(text)
    loops = [part for name, part in module.computations.items() if name != module.entry]
    copied = {one.result.dims for part in loops for one in part.values() if one.op == "copy"}
    assert (8, 256, 64) in {dims[-3:] for dims in copied}  # shapes are as expected
    assert not [dims for dims in copied if dims[:1] == (5,)]


def test_memory_does_not_grow_with_the_microbatches_but_under_gpipe():
    # 12 more microbatches: their five arrays of int32 and float32, of 8 rows each, and no activation of theirs.
    assert temporaries("1f1b", 16) - temporaries("1f1b", 4) < 12 * 5 * 8 * 256 * 4 + ACTIVATION / 2
    # GPipe keeps all 16 inputs of a layer where 1F1B keeps 4, and all 16 gradients of the loss where it keeps one.
    assert temporaries("gpipe", 16) - temporaries("1f1b", 16) > (12 + 15) * ACTIVATION
