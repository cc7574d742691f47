"""Overrides that a user of another trainer types on `configs/quickstart.yaml`: they work, or get one line of advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.cli.main import main
from jaxtrain.config import Config, ConfigError, layout_names
from jaxtrain.config.show import dump_yaml
from jaxtrain.core.layout_check import check_config
from jaxtrain.core.resolve import resolve
from jaxtrain.sharding.axes import AXES, infer_sizes

QUICKSTART = "configs/quickstart.yaml"


def load(*overrides: str) -> tuple[Config, list[str]]:
    """Returns the config and the notes of the quickstart with overrides."""
    notes: list[str] = []
    return resolve(QUICKSTART, *overrides, notes=notes)[0], notes


def sizes(config: Config) -> dict[str, int]:
    """Returns the mesh sizes above 1, with -1 inferred."""
    assert config.simulate is not None
    full = infer_sizes({axis: getattr(config.mesh, axis) for axis in AXES}, config.simulate)
    return {axis: size for axis, size in full.items() if size > 1}


def test_a_warmup_longer_than_the_run_is_cut() -> None:
    assert load("steps=20")[1] == ["schedule.warmup_steps: 40 is cut to the 20 steps of the run"]
    assert load("steps=50")[1] == []


def test_the_command_line_prints_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", QUICKSTART, "steps=20", "simulate=4"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "note  mesh: data 2 x fsdp 2 x model 2 becomes fsdp 2 x model 2 on 4 devices",
        "note  schedule.warmup_steps: 40 is cut to the 20 steps of the run",
    ]


def test_options_of_another_type_are_not_dropped_silently(tmp_path: Path) -> None:
    file, notes = tmp_path / "own.yaml", []
    file.write_text("model:\n  type: package.module:Net\n  options: {width: 8}\n")
    resolve(file, "model.type=package.module:Net", "model.options.depth=2", paths=False, notes=notes)
    assert notes == []
    config, _ = resolve(file, "model.type=package.module:Other", paths=False, notes=notes)
    assert config.model.options == {}
    assert notes == [f"model.type=package.module:Other has its own options: model.options of {file}:3 are not used"]


@pytest.mark.parametrize(
    ("overrides", "notes"),
    [
        (["checkpoint.every=5"], []),
        (["checkpoint.every=null"], []),
        (["eval.every=null"], ["checkpoint.keep_best: only the last checkpoint is ranked by eval/loss"]),
        (["eval.every=null", "checkpoint.keep_best=0"], []),
        (
            ["data.validation_fraction=0"],
            ["eval.every: no data is held out for validation", "checkpoint.keep_best: no checkpoint is ranked"],
        ),
    ],
)
def test_checkpoints_and_validations_need_not_meet(overrides: list[str], notes: list[str]) -> None:
    lines = load(*overrides)[1]
    assert len(lines) == len(notes)
    assert all(line.startswith(note) for line, note in zip(lines, notes))


def test_the_note_on_replaced_sizes_of_a_saved_run_leaves_out_axes_of_one(tmp_path: Path) -> None:
    saved, notes = tmp_path / "config.yaml", []
    saved.write_text(dump_yaml(load()[0]))
    resolve(saved, "layout=fsdp", notes=notes)
    assert len(notes) == 1
    assert "has its own mesh: data 2, fsdp 2, model 2 of" in notes[0]


@pytest.mark.parametrize("name", layout_names())
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_layout_fits_every_number_of_devices(name: str, devices: int) -> None:
    experts = ["model.moe={num_experts: 8}"] if name.startswith("ep") else []
    config, notes = load(f"layout={name}", f"simulate={devices}", *experts)
    sizes(config)  # fits
    assert check_config(config) == []
    assert f"layout {name} has its own mesh: data 2, fsdp 2, model 2" in notes[0]
    assert len(notes) <= 3


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["simulate=4"], {"fsdp": 2, "model": 2}),
        (["simulate=2"], {"model": 2}),
        (["simulate=1"], {}),
        (["simulate=16", "data.global_batch=32"], {"data": 4, "fsdp": 2, "model": 2}),
        (["layout=tp"], {"data": 2, "model": 4}),  # 4 heads
        (["layout=tp", "simulate=4"], {"model": 4}),
        (["mesh.model=4"], {"fsdp": 2, "model": 4}),
        (["mesh.data=4"], {"data": 4, "model": 2}),
        (["layout=tp", "mesh.model=2", "mesh.data=4"], {"data": 4, "model": 2}),
        (["layout=fsdp_tp", "mesh.model=2"], {"fsdp": 4, "model": 2}),
    ],
)
def test_the_mesh_fits_the_devices(overrides: list[str], expected: dict[str, int]) -> None:
    assert sizes(load(*overrides)[0]) == expected


def test_a_batch_that_no_mesh_can_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rules\.batch: 4 sequences"):
        load("layout=fsdp", "data.global_batch=4")


def test_sizes_that_the_layout_of_a_file_does_not_use_become_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("simulate: 8\nlayout: ddp\nmesh: {data: 2, fsdp: 2, model: 2}\n")
    notes: list[str] = []
    config, origin = resolve(path, notes=notes)
    assert sizes(config) == {"data": 8}
    assert notes == ["mesh: layout ddp does not use fsdp 2, model 2", "mesh: data 2 becomes data 8 on 8 devices"]
    assert origin["mesh.model"] == origin["mesh.data"] == "fitted to the devices"
    with pytest.raises(ConfigError, match=r"no rule of the layout uses the axis"):
        resolve(path, "mesh.model=2")


def test_a_mesh_without_sequence_shards_needs_no_ring() -> None:
    config, notes = load("layout=cp_ring", "simulate=1")
    assert config.context_parallel == "auto"
    assert notes[-1] == "context_parallel: ring becomes auto; the mesh does not shard sequences"


def test_a_tracker_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_with(spec: object) -> Config:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
        return load("log.wandb=true")[0]

    assert load_with(object()).log.wandb
    with pytest.raises(ConfigError, match=r"log\.wandb: needs the package wandb: pip install 'jaxtrain\[wandb\]'"):
        load_with(None)


@pytest.mark.parametrize("text", ["[{0}]", "{0}", "[{0}, {{path: stdlib, weight: 2}}]"])
def test_sources_are_plain_paths(tmp_path: Path, text: str) -> None:
    sources = load("data.sources=" + text.format(tmp_path))[0].data.sources
    assert sources[0].path == str(tmp_path)


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("batch_size=8", "jaxtrain calls it `data.global_batch`"),
        ("learning_rate=1e-3", "jaxtrain calls it `optimizer.lr`"),
        ("optimizer.learning_rate=1e-3", "jaxtrain calls it `optimizer.lr`"),
        ("lr=1e-3", "expected optimizer.lr"),
        ("hidden_size=64", "jaxtrain calls it `model.embed`"),
        ("model.hidden_size=64", "jaxtrain calls it `model.embed`"),
        ("num_layers=2", "jaxtrain calls it `model.layers`"),
        ("num_train_epochs=3", "jaxtrain calls it `epochs`"),
    ],
)
def test_names_of_other_trainers_are_answered_with_ours(override: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    key = override.partition("=")[0]
    assert str(caught.value).startswith(f"command line: {key}: unknown key")
    assert str(caught.value).endswith(name)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["--steps", "20"], "--steps is no option; config values are written key=value: steps=20"),
        (["--steps=20"], "--steps is no option; config values are written key=value: steps=20"),
        (["--lr", "1e-3"], "--lr is no option; config values are written key=value: optimizer.lr=1e-3"),
        (["--batch-size", "8"], "--batch-size is no option; config values are written key=value: data.global_batch=8"),
        (["--optimizer.lr", "1"], "--optimizer.lr is no option; config values are written key=value: optimizer.lr=1"),
        (["--epochs", "3"], "--epochs is no option; config values are written key=value: epochs=3"),
        (["--nonsense"], "unrecognized argument: --nonsense"),
    ],
)
def test_flags_are_answered_with_key_value(
    arguments: list[str], advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", QUICKSTART, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jaxtrain: {advice}")


def test_the_later_of_epochs_and_steps_counts(tmp_path: Path) -> None:
    assert (load("epochs=2")[0].epochs, load("steps=7")[0].epochs) == (2, None)
    file = tmp_path / "mine.yaml"
    file.write_text(f"extends: {Path(QUICKSTART).absolute()}\nepochs: 3\n")
    assert resolve(file)[0].epochs == 3
    by_steps = resolve(file, "steps=9")[0]
    assert (by_steps.epochs, by_steps.steps) == (None, 9)
    with pytest.raises(ConfigError, match="2 epochs and 9 steps are both given"):
        load("epochs=2", "steps=9")
    file.write_text(dump_yaml(resolve(file)[0]))  # as a run saves it
    assert resolve(file, "steps=9")[0].epochs is None
