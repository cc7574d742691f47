"""Levels, layouts, overrides and the provenance of values."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.config.load import load, resolve
from jaxtrain.config.schema import Config
from jaxtrain.core.resolve import with_layout


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file under the working folder, which is the temporary one."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    return write


def errors(*args, **kwargs) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolve(*args, **kwargs)
    return str(error.value).split("\n")


def test_levels_win_in_order(write) -> None:
    write("grand.yaml", "steps: 1\nseed: 1\nmodel: {embed: 32, heads: 1}\nname: grand\n")
    write("side.yaml", "seed: 2\nmodel:\n  heads: 2\n")
    write("top/top.yaml", "extends: [../grand.yaml, ../side.yaml]\nmodel: {heads: 4}\n")
    config, origin = resolve("top/top.yaml", "model.layers=7", base={"steps": 9, "model": {"mlp": 64}})
    assert (config.steps, config.seed, config.name) == (1, 2, "grand")
    assert (config.model.embed, config.model.heads, config.model.layers, config.model.mlp) == (32, 4, 7, 64)
    assert origin["model.embed"] == "grand.yaml:3"
    assert origin["seed"] == "side.yaml:1"
    assert origin["model.heads"] == "top/top.yaml:2"
    assert origin["model.layers"] == "command line"
    assert origin["model.mlp"] == "base"
    assert origin["optimizer.lr"] == "default"
    assert origin["mesh.data"] == "layout ddp"


def test_the_default_layout_is_ddp() -> None:
    config = load(None)
    assert config.layout == "ddp"
    assert config.mesh.data == -1
    assert config.rules == {"batch": ("data",)}


LAYOUTS = {
    "layouts/mine.yaml": "mesh: {fsdp: 4, context: 2}\nrules: {batch: fsdp, context: context}\n",
    "parent.yaml": "layout: mine\nmesh: {model: 2}\nrules: {mlp: model}\n",
}


def test_a_layout_replaces_earlier_mesh_and_rules_and_later_ones_refine(write) -> None:
    for name, text in LAYOUTS.items():
        write(name, text)
    own = load("parent.yaml").mesh
    assert (own.fsdp, own.context, own.model) == (4, 2, 2)
    write("child.yaml", "extends: parent.yaml\nmesh: {context: 1}\nrules: {context: null}\n")
    refined = load("child.yaml")
    assert (refined.mesh.fsdp, refined.mesh.context, refined.mesh.model) == (4, 1, 2)
    assert refined.rules == {"batch": ("fsdp",), "context": (), "mlp": ("model",)}
    write("moved.yaml", "extends: parent.yaml\nlayout: ddp\n")
    moved = load("moved.yaml")
    assert moved.mesh == load(None).mesh
    assert moved.rules == load(None).rules
    write("layouts/bare.yaml", "mesh: {data: 2}\n")
    bare = load("parent.yaml", "layout=bare")
    assert bare.rules == {}
    assert bare.mesh.model == 1


def test_a_layout_of_the_command_line_replaces_the_whole_layout_in_any_order(write) -> None:
    for name, text in LAYOUTS.items():
        write(name, text)
    config, origin = resolve("parent.yaml", "mesh.model=8", "layout=tp_sp")
    assert config.mesh.model == 8
    assert (config.mesh.fsdp, config.mesh.context) == (1, 1)
    assert config.rules == load(None, "layout=tp_sp").rules
    assert origin["mesh.model"] == "command line"
    assert origin["rules.heads"] == "layout tp_sp"
    assert load("parent.yaml", "layout=tp_sp", "mesh.model=8") == config


def test_layouts_by_path_and_beside_the_config(write) -> None:
    for name, text in LAYOUTS.items():
        write(name, text)
    write("recipes/deep.yaml", "layout: mine\n")
    write("recipes/path.yaml", "layout: ../layouts/mine.yaml\n")
    assert load("recipes/deep.yaml").mesh.fsdp == 4
    assert load("recipes/path.yaml").mesh.fsdp == 4
    assert load(None, "layout=layouts/mine.yaml").mesh.context == 2
    assert load("recipes/deep.yaml", "layout=layouts/mine.yaml").mesh.context == 2


def test_shipped_files_are_found_from_anywhere(write) -> None:
    write("own.yaml", "extends: models/llama3_8b.yaml\nlayout: fsdp_tp\n")
    assert load("own.yaml").model.mlp == 14336
    assert load("configs/models/llama3_8b.yaml").model.mlp == 14336


def test_overrides_are_yaml_and_reach_into_lists(write) -> None:
    write("c.yaml", "data: {sources: [{path: stdlib, weight: 1}, {path: stdlib}]}\nmodel: {rope_scaling: null}\n")
    config = load(
        "c.yaml",
        "data.sources.1.weight=3",
        "rules.batch=[data, fsdp]",
        "model.rope_scaling.factor=2",
        "optimizer={lr: 1e-3}",
        "schedule.warmup_steps=6",
        "eval.every=",
        "steps=1e4",
        "data.sources.0.weight.10=0.5",
    )
    assert [source.weight for source in config.data.sources] == [{0: 1.0, 10: 0.5}, {0: 3.0}]
    assert config.rules["batch"] == ("data", "fsdp")
    assert config.model.rope_scaling is not None
    assert config.model.rope_scaling.factor == 2
    assert (config.optimizer.lr, config.schedule.warmup_steps, config.steps) == (1e-3, 6, 10_000)
    assert config.eval.every is None
    assert load(None, "data.sources.0.include=['*.py']").data.sources[0].include == ("*.py",)


def test_a_changed_type_drops_earlier_options(write) -> None:
    write("a.yaml", "model: {type: 'my.models:A', options: {width: 3}}\n")
    assert load("a.yaml", "model.options.depth=2").model.options == {"width": 3, "depth": 2}
    assert load("a.yaml", "model.options.depth=2", "model.type='my.models:B'").model.options == {"depth": 2}
    assert load("a.yaml", "model.type=decoder").model.options == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("3e2", 300.0),
        ("1_000", 1000),
        ("0x10", 16),
        ("0o17", 15),
        ("010", 10),
        (".5", 0.5),
        ("-2", -2),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ("10:30", "10:30"),
        ("2020-01-01", "2020-01-01"),
        ("!!str 5", "5"),
        ("1.2.3", "1.2.3"),
        ("3d", "3d"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    result = load(None, "model.type='a.b:C'", f"model.options.x={text}").model.options["x"]
    assert result == value
    assert type(result) is type(value)


def test_anchors_and_merge_keys(write) -> None:
    text = """\
model: &small
  type: a.b:C
  options: &o {x: 1, y: 2}
data:
  type: a.b:D
  options:
    <<: *o
    y: 3
"""
    config, origin = resolve(write("c.yaml", text))
    assert config.data.options == {"x": 1, "y": 3}
    assert origin["data.options.y"] == "c.yaml:8"
    assert origin["data.options.x"] == "c.yaml:3"


def test_circles_of_extends_are_errors(write) -> None:
    write("a.yaml", "seed: 1\nextends: b.yaml\n")
    write("b.yaml", "extends: [c.yaml]\n")
    write("c.yaml", "extends: a.yaml\n")
    message = "c.yaml:1: extends: the files extend each other in a circle: a.yaml -> b.yaml -> c.yaml -> a.yaml"
    assert errors("a.yaml") == [message]
    write("d.yaml", "\nextends: [nope.yaml, 5]\n")
    assert errors("d.yaml") == [
        'd.yaml:2: extends: "nope.yaml": no such file',
        "d.yaml:2: extends: expected a file or a list of files; found 5",
    ]
    for i in range(40):  # a diamond at each level: 2 ** 40 files if each were read again
        write(f"n{i}.yaml", f"extends: [n{i + 1}.yaml, n{i + 1}.yaml]\n")
    write("n40.yaml", "seed: 1\n")
    assert all("more than 64 files" in line for line in errors("n0.yaml"))


def test_unreadable_files(write, tmp_path: Path) -> None:
    assert errors("nope.yaml") == ["nope.yaml: no such file"]
    (tmp_path / "run").mkdir()
    assert errors("run") == ["run: is a folder, not a YAML file"]
    write("run/config.yaml", "")
    assert errors("run") == ["run: is not a file; did you mean run/config.yaml?"]
    os.mkfifo(tmp_path / "pipe")
    assert errors("pipe") == ["pipe: is not a file"]
    (tmp_path / "latin.yaml").write_bytes(b"seed: 1\nname: \xe9\n")
    assert errors("latin.yaml") == ["latin.yaml:2: is not UTF-8 text"]
    write("long.yaml", "#" * 200_000)
    assert errors("long.yaml") == ["long.yaml: is larger than 128 KiB; a config is a few lines"]
    write("list.yaml", "- 1\n- 2\n")
    assert errors("list.yaml") == ["list.yaml:1: expected `key: value` lines, found a list of 2"]
    assert "NUL" in errors(None, 'layout="a\\0b"')[0]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_read_permission(write, tmp_path: Path) -> None:
    write("secret.yaml", "seed: 1\n")
    (tmp_path / "secret.yaml").chmod(0)
    assert errors("secret.yaml") == ["secret.yaml: cannot be read: Permission denied"]


def test_a_config_runs_no_code(write, tmp_path: Path) -> None:
    write("c.yaml", "name: !!python/object/apply:os.mkdir [pwned]\nseed: !!python/name:os.system ''\n")
    lines = errors("c.yaml")
    assert len(lines) == 2
    assert all("is not allowed in a config" in line for line in lines)
    assert not (tmp_path / "pwned").exists()


def test_alias_bombs_and_deep_nesting_are_bounded(write) -> None:
    bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 15))
    assert any("more than 20000 values" in line for line in errors(write("bomb.yaml", bomb)))
    assert "nested more than 24 levels deep" in errors(write("deep.yaml", "[" * 100_000))[0]
    assert any("alias inside itself" in line for line in errors(write("self.yaml", "model: &m {x: *m}\n")))
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    assert any("nested more than 24 levels deep" in line for line in errors(None, base=deep))


def test_config_does_not_import_jax() -> None:
    code = "import sys, jaxtrain.config, jaxtrain.core.layout_check; jaxtrain.load(None); print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("step={remat: full, remat_save: {atention: device}}", "did you mean `attention`"),
        ("checkpoint={keep_best: 1, best_metric: eval/los}", "validation has no metric"),
        ("checkpoint={durable: far, every: 100, durable_every: 150}", "checkpoint.every (100); found 150"),
        ("checkpoint={durable: far, durable_every: 100}", "a multiple of checkpoint.every (null); found 100"),
        ("checkpoint={every: 100, durable_every: 100}", "copies need a destination; set checkpoint.durable too"),
        ('checkpoint={durable: ""}', "is empty; expected a folder, a URL, or null"),
    ],
)
def test_values_without_effect_are_errors(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, override, "eval.every=100")
    assert message in str(caught.value)


def test_samples_need_a_language_model() -> None:
    with pytest.raises(ConfigError, match=r"only the built-in decoder on text generates"):
        load(None, "model.type='a.b:C'", "log.sample_tokens=5")


@pytest.mark.parametrize("path", ["memory://bucket/corpus/*.jsonl", "s3://bucket/corpus"])
def test_object_stores_are_not_searched_on_disk(path):
    config = load(None, f"data.sources=[{{path: {path!r}}}]", f"eval.sets.far.path={path}")
    assert config.data.sources[0].path == config.eval.sets["far"].path == path


def test_a_config_built_in_python_gets_its_layout() -> None:
    loaded = resolve(None, "layout=fsdp", "simulate=8", "zero=0")[0]
    assert not Config(layout="fsdp").has_layout
    assert loaded.has_layout
    assert with_layout(Config(layout="fsdp", simulate=8)) == with_layout(loaded) == loaded
    assert with_layout(Config()).rules["batch"] == ("data",)
    with pytest.raises(ConfigError, match=r"rules\.heads: 4 of dim `heads`"):
        with_layout(Config(layout="tp", simulate=8, mesh={"model": 8}))
    with pytest.raises(ConfigError, match="no layout"):
        with_layout(Config(layout="fsdpp"))


def test_a_dict_extends_files_as_a_file_does(write, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("mine.yaml", "extends: models/llama3_8b.yaml\nmodel: {layers: 3}\n")
    for name in ("mine.yaml", str(tmp_path / "mine.yaml")):
        model = load(None, base={"extends": name, "model": {"heads": 16}}).model
        assert (model.embed, model.layers, model.heads) == (4096, 3, 16)
    assert load(None, base={"extends": "models/llama3_8b"}).model.layers == 32
    with pytest.raises(ConfigError, match=r"extends: .*none\.yaml"):
        load(None, base={"extends": "none.yaml"})


def test_a_file_to_extend_whose_name_is_too_long_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"extends: {'a' * 300}.yaml\n")
    with pytest.raises(ConfigError, match="File name too long") as error:
        load(tmp_path / "a.yaml")
    assert len(str(error.value).splitlines()) == 1
