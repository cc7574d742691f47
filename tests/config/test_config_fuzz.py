"""No config, however malformed, ends in a traceback: mutated texts and trees load or give one-line problems."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxtrain.config import Config, ConfigError, configs_dir, dump_yaml, show
from jaxtrain.config.key_names import all_keys
from jaxtrain.config.load import resolve
from jaxtrain.core.layout_check import check_config

LIMIT = 2.0  # seconds of CPU one config may take
QUICK = settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
FULL = """\
extends: ../models/llama_tiny.yaml
name: fuzz
seed: 3
steps: 100
simulate: 8
layout: 3d
mesh: &sizes {data: 2, fsdp: 2, model: 2}
rules: {batch: [data, fsdp], embed: fsdp}
model:
  heads: 8
  kv_heads: 4
  rope_scaling: {type: llama3, factor: 8.0}
data:
  sources:
    - {path: stdlib, weight: {0: 0.5, 10: 0.25}}
    - path: stdlib
      include: ["*.py", '*.md']
  sequence: 256
  global_batch: 16
optimizer: {name: adamw, lr: 3e-4}
schedule: {name: wsd, warmup_steps: 10}
step: {microbatches: 2, remat: full, remat_save: {attention: device, up: host}}
eval: {every: 50}
log: {sample_tokens: 5}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder beside shipped models and layouts, so that `extends` and `layout` find files."""
    path = tmp_path_factory.mktemp("fuzz")
    for kind in ("models", "layouts"):
        (path / kind).symlink_to(configs_dir() / kind)
    (path / "recipes").mkdir()
    return path / "recipes"


def survives(*args: Any, **kwargs: Any) -> Config | None:
    """Loads in bounded time: returns a Config, or None if every problem is one printable line."""
    start = time.process_time()
    try:
        config, provenance = resolve(*args, checks=[check_config], **kwargs)
    except ConfigError as error:
        config, lines = None, str(error).split("\n")
    else:
        lines = show(config, provenance)
    for line in lines:
        assert line.isprintable(), line
        assert 8 < len(line) < 3000, line
        assert line.encode()  # no lone surrogates
    assert time.process_time() - start < LIMIT
    return config


def mutate(text: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    """The text after deletions, insertions, and copies of parts of itself."""
    for kind, at, junk in edits:
        at %= len(text) + 1
        if kind == "insert":
            text = text[:at] + junk + text[at:]
        elif kind == "delete":
            text = text[:at] + text[at + len(junk) :]
        elif kind == "replace":
            text = text[:at] + junk + text[at + len(junk) :]
        else:
            end = text.find(b"\n", at) + 1 or len(text)
            text = text[:end] + text[at:end] * (1 + len(junk)) + text[end:]
    return text


SNIPPETS = st.sampled_from(
    [
        b": ",
        b"\n",
        b"\n  ",
        b"- ",
        b"[",
        b"]",
        b"{",
        b"}",
        b"&a ",
        b"*a",
        b"*sizes",
        b"<<: *sizes\n",
        b"!!python/object:os.x ",
        b"!!int ",
        b"? ",
        b"| ",
        b"> ",
        b"%",
        b"@",
        b"`",
        b'"',
        b"'",
        b"#",
        b"null",
        b"true",
        b".nan",
        b".inf",
        b"1e400",
        b"-1",
        b"0",
        b"9" * 50,
        b"0x" + b"f" * 40,
        b"\xff\xfe",
        b"\x00",
        b"\t",
        b"---\n",
        b"...\n",
        b'"\\ud800"',
        b'"\\Uffffffff"',
        b"extends: .\n",
        b"layout: ../x.yaml\n",
        b"resolved: true\n",
        b"\xe2\x80\xa8",
        b"a" * 300,
        b"key: value\n",
        b"model",
    ]
)
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "delete", "replace", "repeat"]),
        st.integers(0, 2000),
        st.one_of(SNIPPETS, st.binary(max_size=4)),
    ),
    min_size=1,
    max_size=6,
)


@QUICK
@given(EDITS)
def test_mutated_text(folder: Path, edits: list[tuple[str, int, bytes]]) -> None:
    path = folder / "text.yaml"
    path.write_bytes(mutate(FULL.encode(), edits))
    survives(path)


@settings(QUICK, max_examples=200)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass"))))
def test_any_bytes(folder: Path, raw: bytes) -> None:
    path = folder / "bytes.yaml"
    path.write_bytes(raw)
    survives(path)


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**45), 10**45),
    st.integers(-3, 20),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["", "stdlib", "~x", "../", "a:B", "no.module:Class", "1e3", "x\0y", "\ud800", "data", "3d", "/dev/null"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
TREE = {**yaml.safe_load(FULL), "optimizer": {"name": "adamw", "lr": 3e-4}, "schedule": {"warmup_steps": 10}}
del TREE["extends"]


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All paths of a tree."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


@QUICK
@given(st.data())
def test_mutated_tree(data: st.DataObject) -> None:
    tree = copy.deepcopy(TREE)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(places(tree)[1:] or [()]))
        if not path:
            break
        parent, kind = at(tree, path[:-1]), data.draw(st.sampled_from(["replace", "delete", "rename", "swap"]))
        if kind == "replace":
            parent[path[-1]] = data.draw(VALUES)
        elif kind == "delete":
            del parent[path[-1]]
        elif kind == "rename" and isinstance(parent, dict):
            parent[data.draw(st.one_of(st.text(max_size=6), st.sampled_from(all_keys())))] = parent.pop(path[-1])
        else:
            parent[path[-1]] = copy.deepcopy(at(tree, data.draw(st.sampled_from(places(tree)))))
    survives(None, base=tree)


def test_a_key_with_the_name_of_pydantics_mark() -> None:
    """It is an unknown key like another."""
    for tree in ({"[key]": 1}, {"mesh": {"[key]": 1}}, {"mesh": {"dcn": {"[key]": -1}}}):
        assert survives(None, base=tree) is None


OVERRIDES = st.one_of(
    st.tuples(st.sampled_from(all_keys()), st.one_of(st.text(max_size=10), SCALARS.map(str))).map("=".join),
    st.tuples(st.text(max_size=12), st.text(max_size=8)).map("=".join),
    st.text(max_size=12),
    st.sampled_from(
        [
            "data.sources.0.weight=2",
            "data.sources.7.weight=2",
            "data.sources.-1.path=x",
            "rules={}",
            "mesh=",
            "rules.a.b.c=1",
        ]
    ),
    st.sampled_from(
        ["layout=tp", "layout=[", "layout=..", "model.type=a.b:C", "model.options={a: {b: [1]}}", "..=1", "=", "a=\0"]
    ),
)


@settings(QUICK, max_examples=400)
@given(st.lists(OVERRIDES, min_size=1, max_size=4))
@example(["model.type=a.b:C", "model.moe.capacity_factor=2"])
def test_mutated_overrides(overrides: list[str]) -> None:
    survives(None, *overrides)


# Values that load, for each kind of key: every config built from them that loads also survives a round trip.
GOOD = {
    "name": st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_.\-]{0,8}\Z"),
    "checkpoint.best_metric": st.text(st.characters(codec="utf-8"), max_size=8),
    "data.cache_dir": st.one_of(
        st.just("c"), st.sampled_from(["1e3", "null", "yes", "0x1F", "1_0", "~", "2020-01-01", "a: b", "#", ""])
    ),
    "optimizer.lr": st.floats(0, 1e30),
    "optimizer.epsilon": st.floats(1e-300, 1.0),
    "seed": st.integers(0, 2**32 - 1),
    "steps": st.integers(1, 2**31 - 1),
    "step": st.one_of(
        st.fixed_dictionaries({"remat": st.sampled_from(["none", "full", "dots"])}),
        st.fixed_dictionaries(
            {
                "remat": st.just("full"),
                "remat_save": st.dictionaries(
                    st.sampled_from(["q", "up", "residual"]), st.sampled_from(["device", "host"])
                ),
            }
        ),
    ),
    "layout": st.sampled_from(["ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp", "3d"]),
    "rules": st.dictionaries(
        st.sampled_from(["batch", "mlp", "1", "no"]), st.sampled_from([None, "data", ["data", "fsdp"], []])
    ),
    "mesh": st.dictionaries(st.sampled_from(["data", "model"]), st.sampled_from([-1, 1, 2, 1024])),
    "data.sources": st.lists(
        st.fixed_dictionaries({"weight": st.dictionaries(st.integers(0, 9), st.floats(0.5, 2))}),
        min_size=1,
        max_size=3,
    ),
}


@settings(QUICK, max_examples=150)
@given(st.fixed_dictionaries({}, optional=GOOD))
def test_a_resolved_config_loads_to_itself(folder: Path, values: dict[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    config, _ = resolve(None, base=tree)
    path = folder / "resolved.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    again, provenance = resolve(path)
    assert again == config
    assert dump_yaml(again) == dump_yaml(config)
    assert provenance["seed"].startswith(str(path)) or provenance["seed"].endswith("resolved.yaml:4")
