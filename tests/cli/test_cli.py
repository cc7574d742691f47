"""The command line: instant help, one-line errors, no traceback on bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.cli.setup import has_nvidia_driver, has_tpu


def jaxtrain(*arguments: str, cwd=None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxtrain.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


@pytest.mark.skipif(has_nvidia_driver() or has_tpu(), reason="this machine may have a GPU or TPU")
def test_compilers_of_absent_devices_are_silent():
    code = (
        "from jaxtrain.cli.setup import prepare_jax_import;"
        "prepare_jax_import(None); import jax; print(jax.default_backend())"
    )
    import jax  # noqa: F401  # with it comes libtpu, whose import names the library to all children

    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.stderr == ""
    assert done.stdout.strip() == "cpu"


def test_a_tpu_is_found_on_the_bus(tmp_path: Path, monkeypatch):
    for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "0000:00:04.0").mkdir()
    vendor = tmp_path / "0000:00:04.0" / "vendor"
    vendor.write_text("0x8086\n")
    assert not has_tpu(tmp_path)
    assert not has_tpu(tmp_path / "no bus")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert has_tpu(tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS")
    vendor.write_text("0x1ae0\n")
    assert has_tpu(tmp_path)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from jaxtrain.cli.main import main; main(['--help']); main(['train', '--help']);"
        "print([m for m in ('jax', 'pydantic', 'rich', 'numpy', 'yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert out.splitlines()[-1] == "[]"
    assert "usage: jaxtrain" in out


@pytest.mark.measures
def test_help_answers_at_once():
    def seconds() -> float:
        begin = time.perf_counter()
        assert jaxtrain("--help").returncode == 0
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(5)) < 0.3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean `train`"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", "configs/quickstart.yaml", "optimizer.lrr=1"], "did you mean"),
        (["train", "configs/quickstart.yaml", "layout=fdsp"], "fsdp"),
        (["train", "configs/quickstart.yaml", "mesh.model=3"], "mesh"),
        (["train", "configs/quickstart.yaml", "--profile", "3"], "START:STOP"),
        (["train", "configs/quickstart.yaml", "--deadline", "-1"], "--deadline: expected seconds"),
        (["resume", "nowhere"], "not a run"),
        (["eval", "nowhere"], "not a run"),
        (["launch", "local", "configs/quickstart.yaml"], "--processes"),
        (["launch", "local", "configs/quickstart.yaml", "--processes=3", "--devices-per-process=1"], "and there are 3"),
        (["train", "configs/quickstart.yaml", "dir=/etc/passwd"], "dir and name: Not a directory: /etc/passwd/"),
        (["train", "configs/quickstart.yaml", f"name={'n' * 300}"], "dir and name: File name too long"),
        (["eval", "nowhere", "--limit", "3"], "evaluate: limit is for tasks; expected tasks with it"),
        (["generate", "nowhere", "--prompt", "x", "--temperature", "-1"], "temperature"),
        (["generate", "nowhere", "--prompt", "x", "--temperature", "nan"], "expected a finite temperature"),
        (["generate", "nowhere", "--prompt", "x", "--temperature", "inf"], "expected a finite temperature"),
        (
            ["generate", "nowhere", "--prompt", "x", "--seed", "9" * 23],
            "seed is 99999999999999999999999; expected 0 to",
        ),
        (["generate", "nowhere", "--prompt", b"\xff"], "--prompt is not UTF-8"),
        (["generate", "nowhere", "--prompts", "configs"], "--prompts: configs: Is a directory; expected a text file"),
        (["generate", "nowhere", "--prompts", "nowhere"], "--prompts: nowhere: No such file or directory"),
        (["diff", "configs/quickstart.yaml", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(arguments, said):
    result = jaxtrain(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert all(": " in line and len(line) < 400 for line in result.stderr.strip().splitlines())


def test_what_does_not_fit_is_said_as_the_docs_show():
    """One line for one cause, wrapped there; the two key/value heads would be repeated, were there eight heads."""
    result = jaxtrain("train", "configs/quickstart.yaml", "layout=tp", "mesh.model=8")
    shown = Path("docs/how-to.md").read_text().partition("layout=tp mesh.model=8\njaxtrain: ")[2].partition("\n```")[0]
    assert result.returncode == 2
    assert result.stderr.strip() == "jaxtrain: " + " ".join(shown.splitlines())


def test_config_shows_where_values_come_from():
    out = jaxtrain("config", "configs/quickstart.yaml", "layout=fsdp", "optimizer.lr=1e-4").stdout
    lines = {line.split(":")[0]: line for line in out.splitlines()}
    assert lines["optimizer.lr"].endswith("# command line")
    assert lines["mesh.fsdp"].endswith("# layout fsdp")
    assert "configs/quickstart.yaml:" in lines["model.embed"]
    assert lines["log.every"].endswith("# default")


def test_schema_and_diff():
    assert "properties" in json.loads(jaxtrain("schema").stdout)
    same = jaxtrain("diff", "configs/quickstart.yaml", "configs/quickstart.yaml").stdout
    assert same.strip() == "no difference"


def test_data_commands(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(30):
        (folder / f"{index}.txt").write_text(f"some words number {index} " * 30)
    file = tmp_path / "c.yaml"
    file.write_text(f"data: {{sources: [{{path: {folder}}}], cache_dir: {tmp_path}/cache, workers: 1}}\n")
    built = jaxtrain("data", "build", os.fspath(file))
    assert built.returncode == 0, built.stderr
    assert "training and" in built.stdout
    out = tmp_path / "tokenizer.json"
    made = jaxtrain("data", "tokenizer", os.fspath(file), "--vocab", "300", "--out", os.fspath(out))
    assert made.returncode == 0, made.stderr
    assert out.exists()
    again = jaxtrain("data", "build", os.fspath(file), f"data.tokenizer={out}")
    assert again.returncode == 0, again.stderr
