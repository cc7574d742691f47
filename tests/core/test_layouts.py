"""The layout never changes the result: every shipped layout, on every mesh of eight devices that fits, against one.

Twenty steps of training, every gradient and every update, in float32, on packed documents with padding and rows of
very different weight; a dense decoder with the odd options on, a mixture of experts with its losses, and a GPT-2.
"""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from jaxtrain import load
from jaxtrain.config import Config
from jaxtrain.config.schema import MeshConfig
from jaxtrain.core.placement import placer
from jaxtrain.core.program import build_program
from jaxtrain.verification.candidates import Candidate, candidates
from jaxtrain.verification.compare import GRADIENT, LOSS, UPDATE, Recording, compare
from jaxtrain.verification.packed_batch import RecordedBatches, packed_batch
from jaxtrain.verification.recording import Recorder
from jaxtrain.verification.shrink import shrink

STEPS, DEVICES = 20, 8
MODELS = {
    "dense": {
        "model": {"embed": 32, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 64, "qk_norm": "full",
                  "biases": ["qkv"], "sliding_window": 20, "sliding_window_rope_theta": 500.0,
                  "residual_multiplier": 0.7,
                  "logits_softcap": 20.0},
        "loss": {"z_loss": 1e-3, "label_smoothing": 0.05},
    },
    "moe": {
        "model": {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 32, "tie_embeddings": True,
                  "moe": {"num_experts": 8, "top_k": 2, "shared_experts": 1, "capacity_factor": 1.25,
                  "bias_update_rate": 1e-3,
                          "load_balance_loss": 0.02, "router_z_loss": 1e-3}},
                # Steps so small that no token's two best experts come within rounding of each other: then a choice
                # would flip.
        "optimizer": {"lr": 1e-3}, "seed": 2,
    },
    "gpt2": {
        "model": {"embed": 32, "layers": 4, "heads": 4, "mlp": 64, "activation": "gelu", "biases": ["qkv", "output",
        "mlp"],
                  "norm": "layernorm", "tie_embeddings": True,
                  "learned_positions": 32},
        "data": {"sequence": 32},
    },
}  # fmt: skip
# With experts only what is another program than for a dense model, or meets them in another way.
WITH_EXPERTS = ("ep", "ep_tp", "cp_ring", "cp_ulysses", "zero1")
# Learned positions and biases: where the sequence and the width are shared out, and where stages begin and end.
OF_GPT2 = ("cp_ring", "pp_fsdp")
LAYOUTS = {"dense": ("all",), "moe": WITH_EXPERTS, "gpt2": OF_GPT2}
MOST = {"dense": 2, "moe": 1, "gpt2": 1}  # meshes of a layout; `make matrix` runs them all
PIPELINES = 1  # they take long to compile, and test_parity_pipeline has more of them
MICROBATCHES = ("zero1", "zero2", "zero3", "tp_sp", "cp_ring", "ep")  # with several also where there are no stages


def small(name: str) -> Config:
    base = {"layout": "3d", "optimizer": {"lr": 1e-3}, **MODELS[name]}
    return shrink(load(None, base=base), DEVICES)[0]


def wanted() -> list:
    """(model, layout on a mesh) with an id each. Nothing of this needs JAX to run."""
    found = []
    for name in MODELS:
        seen = Counter()
        for candidate in candidates(small(name), LAYOUTS[name], DEVICES)[0]:
            key = (candidate.layout, candidate.config.step.microbatches)
            seen[key] += 1
            most = PIPELINES if candidate.config.mesh.pipeline > 1 else MOST[name]
            if candidate.config.step.microbatches == 2 and candidate.layout not in MICROBATCHES:
                most = 0
            where = f"{candidate.layout}-{candidate.mesh}-{candidate.config.step.microbatches}".replace(" ", "")
            marks = [pytest.mark.matrix] if seen[key] > most else []
            if name != "dense":  # one reference on one device for all
                marks.append(pytest.mark.xdist_group(f"layouts {name}"))
            found.append(pytest.param(name, candidate, id=f"{name}-{where}", marks=marks))
    return found


ALL = wanted()
WANTED = [parameters for parameters in ALL if pytest.mark.matrix not in parameters.marks]  # by `make test`


def observed(config: Config, devices: int) -> Recording:
    program = build_program(config, config.model.vocab, jax.devices()[:devices])
    data, vocab = config.data, config.model.vocab or 0
    place = placer(
        RecordedBatches([packed_batch(step, data.global_batch, data.sequence, vocab) for step in range(STEPS)]), program
    )
    batches = [place(step) for step in range(STEPS)]
    return Recorder(program, batches[0]).record(batches)


@functools.cache
def one_device(name: str) -> Recording:
    alone = {"mesh": MeshConfig(), "rules": {}, "zero": 0, "context_parallel": "auto", "simulate": None}
    return observed(small(name).model_copy(update=alone), 1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "candidate"), ALL)
def test_a_layout_equals_one_device(name: str, candidate: Candidate):
    want, got = one_device(name), observed(candidate.config, DEVICES)
    verdict = compare(got, want)
    assert verdict.is_equal, verdict
    assert verdict.loss <= LOSS == 1e-5
    assert verdict.gradient <= GRADIENT == 1e-5
    assert verdict.update <= UPDATE
    assert len(got.losses) == STEPS
    assert want.losses[-1] < want.losses[0] - 0.05
    assert all(np.isfinite(got.losses))


def test_the_suite_covers_every_shipped_layout():
    names = {parameters.values[1].config.layout for parameters in WANTED}
    shipped = {path.stem for path in Path(__file__).parents[2].glob("configs/layouts/*.yaml")}
    same = {"hsdp"}  # the same program as fsdp on a mesh with `data`
    assert shipped - names == same
    meshes = [{(p.values[0], p.values[1].layout, p.values[1].mesh) for p in some} for some in (WANTED, ALL)]
    assert len(meshes[0]) >= 32
    assert len(meshes[1]) >= 100
    assert (
        yaml.safe_load((Path(__file__).parents[2] / "configs/layouts/hsdp.yaml").read_text())["rules"]
        == (yaml.safe_load((Path(__file__).parents[2] / "configs/layouts/fsdp.yaml").read_text())["rules"])
    )
