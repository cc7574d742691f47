"""The shipped files, the resolved dump, differences, the flat view and the JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

import jaxtrain
from jaxtrain.config import Config, configs_dir, diff, dump_yaml, flatten, json_schema, show
from jaxtrain.config.key_names import all_keys, section_keys
from jaxtrain.config.load import load, resolve
from jaxtrain.core.layout_check import check_config
from jaxtrain.sharding.axes import AXES

SHIPPED = sorted(path for path in configs_dir().rglob("*.yaml"))
NEEDED = {"continue": ["model.from=null"]}  # overrides for files that are not shipped
LAYOUTS = [path.stem for path in SHIPPED if path.parent.name == "layouts"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_files_open_with_schema_and_purpose(path: Path) -> None:
    first, second = path.read_text(encoding="utf-8").split("\n")[:2]
    prefix = "# yaml-language-server: $schema="
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve() == (configs_dir() / "schema.json").resolve()
    assert second.startswith("# ")
    resolve(path, *NEEDED.get(path.stem, []), paths=False)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_files_are_valid_by_the_schema(path: Path) -> None:
    """As an editor sees them."""
    check = jsonschema.Draft202012Validator(json_schema())
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert [error.message for error in check.iter_errors(data)] == []
    assert list(check.iter_errors(data | {"stepz": 1}))


@pytest.mark.parametrize("name", LAYOUTS)
def test_shipped_layouts_fit_eight_devices(name: str) -> None:
    """Each with a tiny model, kv heads given; and each axis it names is used."""
    model = "moe_tiny" if name.startswith("ep") else "llama_tiny"
    config, origin = resolve(f"configs/models/{model}.yaml", f"layout={name}", "model.kv_heads=8", "simulate=8")
    assert check_config(config) == []
    sizes = {axis: getattr(config.mesh, axis) for axis in AXES}
    assert -1 in sizes.values()
    assert all(origin[f"mesh.{axis}"] == f"layout {name}" for axis, size in sizes.items() if size != 1)


def test_the_layouts_a_researcher_expects() -> None:
    assert {"ddp", "fsdp", "hsdp", "tp", "tp_sp", "fsdp_tp", "3d"} <= set(LAYOUTS)
    tp, tp_sp = load(None, "layout=tp").rules, load(None, "layout=tp_sp").rules
    assert "sequence" not in tp
    assert tp_sp == {**tp, "sequence": ("model",)}
    assert load(None, "layout=fsdp_tp").rules == load(None, "layout=3d").rules


def test_a_resolved_config_needs_no_other_files(tmp_path: Path) -> None:
    layouts = tmp_path / "layouts"
    layouts.mkdir()
    (layouts / "own.yaml").write_text("mesh: {model: -1}\nrules: {batch: data, mlp: model}\n")
    (tmp_path / "c.yaml").write_text("layout: own\nmesh: {data: 2}\nmodel: {rope_scaling: {factor: 2}}\n")
    config = load(tmp_path / "c.yaml", "data.sources=[{weight: {5: 0.5}}]")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(dump_yaml(config))
    (layouts / "own.yaml").write_text("mesh: {fsdp: 4}\nrules: {embed: fsdp, vocab: model}\n")
    assert load(run / "config.yaml") == config
    (layouts / "own.yaml").unlink()
    again, origin = resolve(run / "config.yaml")
    assert again == config
    assert again.layout == "own"
    assert origin["rules.mlp"].endswith("config.yaml:22")
    moved = load(run / "config.yaml", "layout=ddp", "mesh.data=4")
    assert (moved.mesh.data, moved.mesh.model, moved.rules) == (4, 1, {"batch": ("data",)})
    assert load(run / "config.yaml", "rules.mlp=null").rules == {"batch": ("data",), "mlp": ()}


def test_a_resolved_config_of_a_user_model_loads(tmp_path: Path) -> None:
    config = load(None, "model.type='a.b:C'", "model.options={x: [1, {y: null}], z: 'on'}", "data.type='a.b:D'")
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load(tmp_path / "config.yaml") == config
    assert "model.heads" not in flatten(config)
    assert "data.sources.0.path" not in flatten(config)


@pytest.mark.parametrize("text", ["\x85", "\u2028", "a\r\nb", "\t", " x ", "\ufeff", "- a", "1e3", "0b1", "null", "é"])
def test_any_text_survives_the_dump(tmp_path: Path, text: str) -> None:
    config = load(None, base={"data": {"cache_dir": text}})
    (tmp_path / "config.yaml").write_bytes(dump_yaml(config).encode())
    assert load(tmp_path / "config.yaml") == config


def test_flat_keys_are_those_of_the_schema() -> None:
    flat = flatten(Config())
    absent = ("model.rope_scaling", "model.moe", "debug.faults", "optimizer.groups", "callbacks", "log.trackers")
    keys = {key for key in all_keys() if not key.startswith(tuple(f"{a}." for a in absent))} | set(absent)
    keys -= {key for key in keys if key.startswith("sync.")} - {"sync.strategy"}  # which `bsp` does not read
    keys -= {key for key in keys if key.startswith("islands.")}  # there are none
    assert set(flat) == keys - {"data.sources.0.weight"} | {"data.sources.0.weight.0"}
    assert flat["data.sources.0.path"] == "stdlib"
    assert len(all_keys()) <= 175
    for key in flat:
        assert load(None, f"{key}={yaml.safe_dump(flat[key], default_flow_style=True)}", base={"layout": "ddp"})


def test_diff_has_keys_values_and_origins(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("steps: 10\nmodel: {heads: 8}\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.yaml").write_text(
        dump_yaml(load(tmp_path / "a.yaml", "optimizer.lr=1e-2", "layout=fsdp"))
    )
    lines = [str(difference) for difference in jaxtrain.diff(tmp_path / "a.yaml", tmp_path / "b")]
    keys = [line.split(": ")[0] for line in lines]
    assert keys == ["layout", "mesh.data", "mesh.fsdp", "rules.batch", "optimizer.lr", "rules.embed"]
    assert lines[0].startswith("layout: ddp -> fsdp  # default -> ")
    assert lines[0].endswith("/b/config.yaml:10")
    assert "optimizer.lr: 0.0003 -> 0.01  # default -> " in lines[4]
    assert "rules.embed: absent -> [fsdp]  # absent -> " in lines[5]
    assert jaxtrain.diff(tmp_path / "a.yaml", tmp_path / "a.yaml") == []


def test_diff_of_configs() -> None:
    a = load(None)
    assert diff(a, a) == {}
    assert diff(a, load(None, "seed=3", "optimizer.grad_clip_norm=null")) == {
        "seed": (0, 3),
        "optimizer.grad_clip_norm": (1.0, None),
    }


def test_show_has_the_origin_of_every_key() -> None:
    config, origin = resolve(None, "layout=3d", base={"data": {"cache_dir": "a\n\x1b[0mb"}})
    lines = show(config, origin)
    assert len(lines) == len(flatten(config))
    origins = {line.split(": ")[0]: line.rpartition("  # ")[2] for line in lines}
    assert origins["data.cache_dir"] == "base"
    assert origins["layout"] == "command line"
    assert origins["rules.embed"] == "layout 3d"
    assert origins["steps"] == "default"
    assert all(line.isprintable() for line in lines)
    values = yaml.safe_load("\n".join(lines))
    assert values["rules.batch"] == ["data", "fsdp"]
    assert values["data.cache_dir"] == "a\n\x1b[0mb"


def test_the_shipped_schema_is_up_to_date() -> None:
    """To update it: `jaxtrain schema > configs/schema.json`."""
    shipped = json.loads((configs_dir() / "schema.json").read_text(encoding="utf-8"))
    assert shipped == json_schema()


def test_the_schema_describes_each_key() -> None:
    for key in all_keys():
        *path, name = key.split(".")
        assert name in section_keys(tuple(path)), key
    properties = json_schema()["properties"]
    assert {"extends", "resolved"} <= set(properties)
    for name, section in {"config": json_schema(), **json_schema()["$defs"]}.items():
        for key, part in section["properties"].items():
            assert part.get("description"), f"{name}.{key}"
        assert section["additionalProperties"] is False
