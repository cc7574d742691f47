"""The mesh doctor: each cause once, naming tensor, dim, sizes and what would work; and silence where all is well."""

from __future__ import annotations

import itertools
import subprocess
import sys
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config.schema import MeshConfig
from jaxtrain.sharding.axes import AXES, infer_sizes
from jaxtrain.sharding.check import check

TENSORS: dict[str, Any] = {
    "table": ((96, 32), ("vocab", "embed")),
    "q": ((2, 32, 8, 4), ("layers", "embed", "heads", "head_dim")),
    "k": ((2, 32, 2, 4), ("layers", "embed", "kv_heads", "head_dim")),
    "v": ((2, 32, 2, 4), ("layers", "embed", "kv_heads", "head_dim")),
    "up": ((2, 32, 48), ("layers", "embed", "mlp")),
    "scale": ((32,), (None,)),
}
ACTIVATIONS = {"batch": 8, "sequence": 64, "context": 64}
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("model",),
    "kv_heads": ("model",),
    "mlp": ("model",),
    "vocab": ("model",),
}


def found(mesh: dict[str, Any], devices: int | None = 8, tensors: Any = TENSORS, rules: Any = RULES, **sizes: int):
    problems = check(MeshConfig(**mesh), rules, tensors, {**ACTIVATIONS, **sizes}, devices)
    assert all(problem.where == "" and "\n" not in str(problem) for problem in problems)
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    "mesh", [{"data": 8}, {"data": -1}, {"data": 2, "fsdp": -1, "model": 2}, {"fsdp": 4, "model": 2}]
)
def test_a_good_mesh_is_silent(mesh: dict[str, int]) -> None:
    assert found(mesh) == []


@pytest.mark.parametrize(
    ("mesh", "devices", "expected"),
    [
        ({"data": 3}, 8, "mesh: data 3 needs 3 devices, and there are 8; would fit: mesh.data=8"),
        (
            {"data": 2, "model": 2},
            8,
            "mesh: data 2 x model 2 needs 4 devices, and there are 8; would fit: mesh.data=4 or mesh.model=4",
        ),
        ({"data": 2}, 1, "mesh: data 2 needs 2 devices, and there is 1; would fit: mesh.data=1"),
        (
            {"data": -1, "model": 3},
            8,
            "mesh: model 3 needs a multiple of 3 devices, and there are 8; would fit: mesh.model=2 or mesh.model=4",
        ),
        (
            {"data": -1, "fsdp": 3, "model": 3},
            8,
            "mesh: fsdp 3 x model 3 needs a multiple of 9 devices, and there are 8; nearest number of devices: 9",
        ),
        (
            {"data": 5, "fsdp": 3},
            8,
            "mesh: data 5 x fsdp 3 needs 15 devices, and there are 8; set mesh.data to -1"
            " and the others to a divisor of 8",
        ),
        (
            {},
            4,
            "mesh: a mesh of ones needs 1 device, and there are 4; set mesh.data to -1 and the others to"
            " a divisor of 4",
        ),
    ],
)
def test_sizes_against_devices(mesh: dict[str, int], devices: int, expected: str) -> None:
    assert found(mesh, devices, rules={"batch": ("data", "fsdp", "model")}, batch=720) == [expected]


def test_only_one_axis_fills() -> None:
    assert found({"data": -1, "fsdp": -1}) == [
        "mesh.fsdp: only one axis may be -1 (inferred), but mesh.data and mesh.fsdp both are; give all but one a size"
    ]
    assert found({"data": -1, "fsdp": -1, "model": -1})[0].startswith("mesh.model: only one axis may be -1")


def test_unknown_devices_check_what_is_known() -> None:
    assert found({"data": -1, "model": 2}, None) == []
    lines = found({"data": -1, "fsdp": 3}, None, tensors={})
    assert len(lines) == 1
    assert "cannot be split into 3 (fsdp 3)" in lines[0]
    assert [line.split(":")[0] for line in found({"data": -1, "model": 4}, None)] == ["rules.kv_heads"]


def test_dcn() -> None:
    assert found({"data": 8, "dcn": {"data": 2}}) == []
    assert found({"data": -1, "dcn": {"data": 3}}) == [
        "mesh.dcn.data: 3 slices do not divide mesh.data 8; expected e.g. 1, 2 or 4"
    ]
    assert found({"data": 8, "dcn": {"dta": 2}})[0].startswith(
        "mesh.dcn.dta: unknown axis (did you mean `data`?); the axes are"
    )


def test_unknown_names_and_axes() -> None:
    lines = found({"data": 8}, rules={**RULES, "head": ("model",), "mlp": ("modle",), "vocab": ("model", "model")})
    assert lines == [
        "rules.mlp: unknown axis `modle` (did you mean `model`?); the axes are replica, pipeline, data, fsdp, expert,"
        " context and model",
        "rules.vocab: axis `model` is given twice; expected once",
        "rules.head: no tensor has a dim `head` (did you mean `heads` or `kv_heads`?)",
    ]
    assert found({"data": 8}, tensors=None, rules={**RULES, "hidden": ("model",)}) == []
    assert found({"data": 8}, tensors={"w": ((8, 8), ("hidden", None))}, rules={**RULES, "hidden": ("model",)}) == []


def test_an_axis_used_twice_on_a_tensor() -> None:
    lines = found({"fsdp": 8}, rules={"batch": ("fsdp",), "embed": ("fsdp",), "mlp": ("fsdp",), "layers": ("fsdp",)})
    assert lines[0] == (
        "rules.layers: axis `fsdp` would shard both `embed` and `layers` of q (dims 0 and 1), k (dims 0"
        " and 1), v (dims 0 and 1)"
        " and up (dims 0 and 1); expected it in one of these rules"
    )
    assert "axis `fsdp` would shard both `batch` and `mlp` of the feed-forward activations (dims 0 and 2)" in "\n".join(
        lines
    )
    lines = found({"data": 8}, tensors={"w": ((8, 8), ("a", "a"))}, rules={"batch": ("data",), "a": ("data",)})
    assert lines == [
        "rules.a: axis `data` would shard two dims `a` of w (dims 0 and 1); expected it in one of these rules"
    ]
    assert found({"data": 8}, rules={"batch": ("data",), "embed": ("fsdp",), "mlp": ("fsdp",)}) == []  # fsdp is 1


def test_indivisible_dims_in_one_line_for_each_cause() -> None:
    lines = found({"model": 8, "fsdp": 3}, 24, batch=9)
    assert lines == [
        "rules.embed: 32 of dim `embed` in table (dim 1), q (dim 1), k (dim 1), v (dim 1) and up (dim 1)"
        " cannot be split into"
        " 3 (fsdp 3); expected `embed` of 30 or 33, or 1, 2 or 4 shards",
        "rules.kv_heads: 2 of dim `kv_heads` in k (dim 2) and v (dim 2) cannot be split into 8 (model"
        " 8); expected `kv_heads` of 8, or 1 or 2 shards",
    ]
    lines = found({"data": 2, "fsdp": 3}, 6, batch=8, tensors={})
    assert lines == [
        "rules.batch: 8 sequences per microbatch (data.global_batch / step.microbatches) cannot be split"
        " into 6 (data 2 x fsdp 3);"
        " expected 6 or 12, or 2, 4 or 8 shards"
    ]
    lines = found({"model": 8}, rules={"batch": ("data",), "sequence": ("model",)}, sequence=100)
    assert lines[0].startswith(
        "rules.sequence: 100 tokens per sequence (data.sequence) cannot be split into 8 (model 8)"
    )


def test_idle_axes() -> None:
    message = "devices, but no rule of the layout uses the axis: they would repeat the same work"
    lines = found({"data": 4, "context": 2})
    assert len(lines) == 1
    assert lines[0].startswith(f"mesh.context: 2 {message}")
    # A rule for a dim the model lacks does not use the axis.
    assert len(found({"data": 4, "expert": 2}, rules={**RULES, "expert": ("expert",)})) == 1
    assert found({"data": 4, "context": 2}, tensors=None, rules={**RULES, "hidden": ("context",)}) == []


RULE = st.lists(st.sampled_from(["data", "fsdp", "context", "model"]), max_size=2, unique=True).map(tuple)


@settings(max_examples=300)
@given(
    st.fixed_dictionaries({axis: st.sampled_from([-1, 1, 2, 3, 4]) for axis in ("data", "fsdp", "context", "model")}),
    st.fixed_dictionaries({}, optional=dict.fromkeys([*RULES, "sequence", "context"], RULE)),
    st.integers(1, 16),
)
def test_what_passes_can_be_placed_and_what_is_refused_can_not(sizes: dict, rules: dict, devices: int) -> None:
    """Against a direct statement of what placement needs: whole shards, an axis once on a tensor, no idle axis."""
    problems = check(MeshConfig(**sizes), rules, TENSORS, ACTIVATIONS, devices)
    try:
        full = infer_sizes(sizes, devices)
    except ValueError:
        assert any(problem.key.startswith("mesh") for problem in problems)
        return
    tables = [(names, shape) for shape, names in TENSORS.values()]
    tables += [(("batch", "sequence", None), (8, 64, 32)), (("batch", "context", "heads"), (8, 64, 8))]
    tables += [
        (("batch", "context", name), (8, 64, size)) for name, size in (("kv_heads", 2), ("mlp", 48), ("vocab", 96))
    ]
    bad = False
    for names, shape in tables:
        dims = [[axis for axis in rules.get(name, ()) if full[axis] > 1] for name in names]
        flat = list(itertools.chain(*dims))
        bad |= len(flat) != len(set(flat))
        bad |= any(size % prod(full[axis] for axis in axes) for axes, size in zip(dims, shape))
    used = {axis for axes in rules.values() for axis in axes}
    bad |= any(size > 1 and axis not in used for axis, size in full.items())
    assert bool(problems) == bad, problems


def test_layout_check_needs_no_jax() -> None:
    code = "import sys, jaxtrain.sharding.check, jaxtrain.core.layout_check; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_axes_are_those_of_the_schema() -> None:
    assert [name for name in MeshConfig.model_fields if name != "dcn"] == list(AXES)
