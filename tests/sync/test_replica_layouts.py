"""Any layout inside a replica: the decoder's losses and parameters are those of replicas of one device each."""

from __future__ import annotations

from functools import cache
from typing import Any

import harness
import jax
import numpy as np
import pytest

STEPS = 3
SYNC = {"strategy": "diloco", "every": 2}
PLAIN = {"model": {"sliding_window": None, "sliding_window_pattern": 1}, "steps": 4}
RULES = {**harness.RULES, "layers": ["pipeline"], "context": ["context"]}
EXPERTS = {"moe": {"num_experts": 4, "top_k": 2}, **PLAIN["model"]}


def history(mesh: dict[str, int], rules: dict[str, Any] = RULES, **changes: Any) -> tuple[list[float], Any]:
    """Losses of some steps, and the parameters that the replicas agree on after them."""
    changes = {**PLAIN, **changes}
    program = harness.program({"replica": 2, **mesh}, rules, sync=SYNC, **changes)
    state, losses = program.init(), []
    for step in range(STEPS):
        state, metrics = program.step_at(step)(state, harness.placed(program, step))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(program.agreed(state)["params"])


@cache
def expected(kind: str) -> tuple[list[float], Any]:
    model = {"moe": {"model": EXPERTS}}.get(kind, {})
    return history({}, {"batch": []}, **model)


def check(mesh: dict[str, int], kind: str = "dense", rules: dict[str, Any] = RULES, **changes: Any) -> None:
    losses, params = history(mesh, rules, **changes)
    np.testing.assert_allclose(losses, expected(kind)[0], rtol=1e-5)
    harness.close_trees(expected(kind)[1], params, 1e-4)


def test_a_pipeline_inside_a_replica() -> None:
    """Beside data parallel rows, whose gradients are accumulated apart and reduced once."""
    check({"pipeline": 2, "data": 2}, step={"microbatches": 2})


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"fsdp": 4}, {}),
        ({"model": 4}, {}),
        ({"data": 2, "model": 2}, {"zero": 1, "step": {"microbatches": 2}}),
        ({"data": 4}, {"zero": 3}),
        ({"data": 4}, {"step": {"microbatches": 1, "remat": "full"}}),
        ({"context": 2, "fsdp": 2}, {"context_parallel": "gather"}),
        ({"context": 2, "fsdp": 2}, {"context_parallel": "ulysses"}),
        ({"context": 4}, {"context_parallel": "ring"}),
        ({"pipeline": 2, "model": 2}, {"step": {"microbatches": 4}, "pipeline": {"schedule": "zb_h1"}}),
        ({"pipeline": 2, "fsdp": 2}, {"step": {"microbatches": 2}, "zero": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_every_layout_inside_a_replica(mesh: dict[str, int], changes: dict[str, Any]) -> None:
    check(mesh, **changes)


@pytest.mark.matrix
def test_experts_inside_a_replica() -> None:
    rules = {**harness.RULES, "batch": ["data", "fsdp", "expert"], "expert": ["expert"]}
    check({"expert": 2, "fsdp": 2}, "moe", rules, model=EXPERTS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sync",
    [
        {**SYNC, "compress": {"deltas": "int4"}},
        {**SYNC, "strategy": "streaming_diloco", "every": 4, "compress": {"deltas": "int4"},
         "streaming": {"fragments": 2, "tau": 2}},
        {"compress": {"gradients": "int8"}},
    ],
    ids=["diloco", "streaming_diloco", "bsp"],
)  # fmt: skip
def test_residuals_lie_in_parts_on_all_devices(sync: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of workers as the parameters do; those of servers by their blocks, before and after an exchange."""
    monkeypatch.setattr("jaxtrain.sync.quantized_mean.SMALLEST", 64)
    program = harness.program({"replica": 2, "fsdp": 2, "model": 2}, RULES, sync=sync, **PLAIN)
    state = program.init()
    for step in range(STEPS):
        own = state["sync"]["own"]
        servers = [x for x in jax.tree.leaves(own["server"]) if x.shape[-2] % 4 == 0]
        workers = [x for x in jax.tree.leaves(own["worker"]) if x.size > 2048]
        assert len(servers) > 3
        assert len(workers) > 3
        for arrays, parts in ((servers, 8), (workers, 4)):  # some parameters are split over one axis of a replica
            assert [x.shape for x in arrays if x.addressable_shards[0].data.size > x.size // parts] == []
        state, _ = program.step_at(step)(state, harness.placed(program, step))
