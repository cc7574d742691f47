"""What `context` asks of a config: refused in one line before JAX starts, with what would work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain import load
from jaxtrain.config import ConfigError, dump_yaml
from jaxtrain.core.layout_check import check_config
from jaxtrain.core.resolve import resolve

BASE = {"model": {"heads": 8, "embed": 64}, "simulate": 8, "data": {"sequence": 1024}}


def problems(*overrides: str) -> list[str]:
    try:
        resolve(None, *overrides, base=BASE, checks=[check_config])
    except ConfigError as error:
        return str(error).split("\n")
    return []


@pytest.mark.parametrize("layout", ["cp_ulysses", "cp_ring", "cp_gather"])
def test_shipped_layouts_say_their_formulation(layout: str) -> None:
    config, origin = resolve(None, f"layout={layout}", base=BASE, checks=[check_config])
    assert config.context_parallel == layout.removeprefix("cp_")
    assert origin["context_parallel"] == f"layout {layout}"
    assert config.rules["embed"] == ("fsdp", "context")
    assert problems(f"layout={layout}", "mesh.context=2") == []


def test_the_formulation_belongs_to_the_layout(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_yaml(load(None, "layout=cp_ring", base=BASE)))
    assert load(tmp_path / "run.yaml").context_parallel == "ring"
    assert load(tmp_path / "run.yaml", "layout=fsdp").context_parallel == "auto"
    config, origin = resolve(tmp_path / "run.yaml", "context_parallel=gather")
    assert (config.context_parallel, origin["context_parallel"]) == ("gather", "command line")
    assert load(None, "context_parallel=gather", "layout=cp_ring").context_parallel == "gather"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["layout=cp_ring", "data.sequence=1020"],
            "command line: data.sequence: 1020 tokens cannot be split into 8 chunks, two for each of 4 shards"
            " (ring); expected 1016 or 1024, or context_parallel: ulysses or gather",
        ),
        (
            ["layout=cp_gather", "data.sequence=1022"],
            "layout cp_gather: rules.sequence: 1022 tokens per sequence (data.sequence) cannot be split into 4"
            " (context 4); expected 1020 or 1024, or 1, 2 or 7 shards",
        ),
        (
            ["layout=cp_ulysses", "model.heads=6", "model.head_dim=8"],
            "layout cp_ulysses: context_parallel: ulysses exchanges heads among the 4 shards of context, and 6 heads"
            " are 6 a device; expected 2, 3 or 6 shards, or context_parallel: ring or gather",
        ),
        (
            ["layout=cp_ulysses", "mesh.model=2", "rules.heads=model", "rules.kv_heads=model", "model.heads=4"],
            "layout cp_ulysses: context_parallel: ulysses exchanges heads among the 4 shards of context, and 4 heads"
            " over 2 shards are 2 a device; expected 1 or 2 shards, or context_parallel: ring or gather",
        ),
        (
            ["layout=fsdp", "context_parallel=ring"],
            "command line: context_parallel: ring needs sharded sequences, and the layout does not shard them;"
            " expected auto, or a rule `context: context` with mesh.context above 1",
        ),
        (
            ["layout=cp_ring", "mesh.context=1"],
            "layout cp_ring: context_parallel: ring needs sharded sequences, and the layout does not shard them;"
            " expected auto, or mesh.context above 1",
        ),
        (
            ["layout=cp_ring", "step.attention=splash"],
            "command line: step.attention: `splash` needs whole sequences, and context_parallel: ring keeps them"
            " sharded; expected auto or xla, or context_parallel: ulysses",
        ),
        (
            ["layout=cp_gather", "step.attention=cudnn"],
            "command line: step.attention: `cudnn` needs whole sequences, and context_parallel: gather keeps them"
            " sharded; expected auto or xla, or context_parallel: ulysses",
        ),
        (
            ["layout=cp_ulysses", "context_parallel=auto", "model.heads=6", "model.head_dim=8", "step.attention=cudnn"],
            "command line: step.attention: `cudnn` needs whole sequences, and context_parallel: gather keeps them"
            " sharded; expected auto or xla, or heads that the 4 shards of context divide",
        ),
        (
            ["layout=cp_ring", "mesh.model=2", "rules.kv_heads=null"],
            "command line: rules.kv_heads: attention across shards of a sequence needs `heads` and `kv_heads` on the"
            " same axes; found model, and none",
        ),
        (
            ["context_parallel=rign"],
            'command line: context_parallel: expected auto, gather, ulysses or ring; found "rign" (did you'
            " mean `ring`?)",
        ),
    ],
)
def test_what_cannot_be_is_refused(overrides: list[str], expected: str) -> None:
    assert problems(*overrides) == [expected]


def test_a_users_own_data_for_a_users_own_model_is_not_permuted() -> None:
    own = ["layout=cp_ring", "model.type='a.b:C'", "data.type='a.b:D'"]
    base = {"simulate": 8}
    with pytest.raises(ConfigError, match="ring permutes the tokens of a row"):
        resolve(None, *own, base=base, checks=[check_config])
    assert load(None, *own[1:], "layout=cp_gather", base=base).context_parallel == "gather"


def test_auto_is_never_refused() -> None:
    assert problems("layout=fsdp", "context_parallel=auto") == []
    assert problems("layout=cp_ulysses", "context_parallel=auto", "model.heads=6", "model.head_dim=8") == []
    assert check_config(load(None, "layout=cp_ring", "mesh={fsdp: 2, context: -1}")) == []  # unknown until it runs


def test_no_jax_before_the_answer() -> None:
    code = "import sys, jaxtrain.sharding.context_parallel; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
