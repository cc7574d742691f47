"""What pipeline stages keep: as much as the schedule's table says, however many microbatches a step has."""

from __future__ import annotations

import functools

import jax

from jaxtrain.config import resolve
from jaxtrain.plan import memory, step
from jaxtrain.plan.communication import permutes_in_conditionals
from jaxtrain.train.program import build

SIZES = (
    "mesh.pipeline=4", "mesh.fsdp=1", "data.sequence=256", "model.embed=64", "model.layers=4", "model.heads=2",
    "model.kv_heads=2", "model.mlp=128", "model.vocab=256", "precision=fp32", "step.remat=full", "loss.chunks=4",
)  # fmt: skip
ACTIVATION = 8 * 256 * 64 * 4  # bytes of a microbatch of 8 rows


@functools.cache
def temporaries(schedule: str, microbatches: int) -> int:
    own = (f"pipeline.schedule={schedule}", f"step.accumulate={microbatches}", f"data.global_batch={8 * microbatches}")
    config = resolve(None, "layout=pp_fsdp", *SIZES, *own, paths=False)[0]
    compiled = step.compiled_step(build(config, 256, jax.devices()[:4]))
    assert permutes_in_conditionals(compiled.as_text()) == []
    return memory.compiled_memory(compiled).temporaries


def test_memory_does_not_grow_with_the_microbatches_but_under_gpipe():
    assert temporaries("1f1b", 16) - temporaries("1f1b", 4) < ACTIVATION
    # GPipe keeps all 16 inputs of a layer where 1F1B keeps 4, and all 16 gradients of the loss where it keeps one.
    assert temporaries("gpipe", 16) - temporaries("1f1b", 16) > (12 + 15) * ACTIVATION
