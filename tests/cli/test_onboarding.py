"""`jaxtrain init` writes what trains; `jaxtrain doctor` says what is wrong with a machine, and does not hang."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxtrain.cli.commands.onboarding import doctor, machine_checks
from jaxtrain.cli.commands.onboarding.machine_checks import Finding
from jaxtrain.cli.main import main

SMALL = {
    "gpt": ["model.embed=16", "model.layers=1", "model.heads=2", "model.mlp=32", "log.sample_tokens=0"],
    "classifier": ["model.options={width: 4}"],
    "own-model": ["model.options={vocab: 257, width: 16, layers: 1, heads: 2}"],
}


def test_what_init_writes_trains(tmp_path: Path):
    """All three in one process, on a text of its own; the names are those given."""
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text("to be or not to be, that is the question.\n" * 10)
    text = [f"data.sources={tmp_path}/text", f"data.cache_dir={tmp_path}/cache", "data.validation_fraction=0.2"]
    common = [
        "steps=3",
        "simulate=2",
        "eval.every=null",
        "eval.batches=1",
        "checkpoint.every=null",
        "log.tensorboard=false",
    ]
    calls = []
    for template, keys in SMALL.items():
        name = f"my-{template}"
        calls += [["init", name, "--template", template]]
        calls += [["train", f"{name}.yaml", *common, *keys, *([] if template == "classifier" else text)]]
    code = f"from jaxtrain.cli.main import main\nfor call in {calls!r}:\n    assert main(call) == 0, call\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=400, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for template in SMALL:
        records = (tmp_path / "runs" / f"my-{template}" / "metrics.jsonl").read_text().splitlines()
        assert json.loads(records[-1])["step"] == 3
    for line in (
        "data      my_classifier:Images: image float32[12, 12, 1], label int32[] of each row",
        "plan      validation at the end, checkpoint at the end; Ctrl-C saves, too",
        "next      compiles the step, then shows progress; layout.txt in the run's folder lists all tensors",
        "devices   2 x simulated cpu, layout fsdp: fsdp 2",
    ):
        assert f"{line}\n" in done.stdout
    assert re.search(r"\nstep 3/3 .* samples/s .* accuracy 0\.\d", done.stdout)
    assert "mfu" not in done.stdout
    assert {path.name for path in tmp_path.glob("*.py")} == {"my_classifier.py", "my_own_model.py"}


@pytest.mark.parametrize("template", SMALL)
def test_the_config_that_init_writes_is_complete_and_commented(template: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "first", "--template", template]) == 0
    text = (tmp_path / "first.yaml").read_text()
    schema = Path(text.splitlines()[0].partition("$schema=")[2])
    assert schema.is_file()
    assert "name: first " in text
    assert "jaxtrain train first.yaml" in text
    old = template.replace("-", "_")
    assert not re.search(rf"{old}(:|\.py|\.yaml)", text.partition("\n")[2])
    assert sum("# " in line for line in text.splitlines()) > 10
    capsys.readouterr()
    assert main(["init", "first", "--template", template]) == 2
    assert "first.yaml is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("json", "another module `json`"),
        ("optax", "another module `optax`"),
        ("3d", "is no name"),
        ("a/b", "is no name"),
    ],
)
def test_names_that_would_not_work_are_refused(name: str, said: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", name, "--template", "own-model"]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_doctor_looks_at_this_machine(tmp_path: Path, capsys):
    code = main(["doctor", "--dir", str(tmp_path / "runs"), "--timeout", "120"])
    out = capsys.readouterr().out
    for title in ("versions", "devices", "memory", "disk", "cache", "ports", "clock", "limits", "environment"):
        assert any(line[6:].startswith(title) for line in out.splitlines()), out
    assert code == (1 if "ERROR" in out else 0)
    assert "x cpu (cpu)" in out or "GiB each" in out
    assert not list(tmp_path.iterdir())  # leaves nothing


@pytest.mark.measures
def test_a_check_that_hangs_is_given_up():
    checks = {
        "quick": lambda: [Finding("ok", "fine")],
        "dead": lambda: time.sleep(600) or [],
        "broken": lambda: [1 / 0],
    }
    begin = time.monotonic()
    found = dict(doctor.results(checks, -4.5))  # and half a second
    assert time.monotonic() - begin < 60
    assert found["quick"] == [Finding("ok", "fine")]
    assert found["dead"][0].level == "ERROR"
    assert "does not answer" in found["dead"][0].text
    assert "ZeroDivisionError" in found["broken"][0].text


def test_devices_that_hang_or_crash_are_said(monkeypatch):
    monkeypatch.setattr(machine_checks, "DEVICES", "import time; time.sleep(600)")
    assert "does not start within 0.5 s" in machine_checks.devices(0.5)[0].text
    monkeypatch.setattr(machine_checks, "DEVICES", "raise RuntimeError('no such chip')")
    assert machine_checks.devices(60) == [
        Finding("ERROR", "JAX does not start (exit code 1): RuntimeError: no such chip")
    ]


def test_an_unused_accelerator_is_said():
    cpu = {"count": 1, "kind": "cpu", "platform": "cpu", "limit": None}
    assert machine_checks.device_findings(cpu, True, False)[-1].text.startswith(
        "an NVIDIA GPU is here and JAX does not"
    )
    gpu = {"count": 8, "kind": "NVIDIA H100", "platform": "gpu", "limit": 64 * 2**30}
    assert machine_checks.device_findings(gpu, True, False) == [Finding("ok", "8 x NVIDIA H100 (gpu), 64.0 GiB each")]


def test_trouble_in_disk_and_environment_is_said(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    assert machine_checks.disk(str(tmp_path / "not" / "yet"))[0].level == "ok"
    monkeypatch.setenv("JAX_DEBUG_NANS", "1")
    assert Finding("warn", "JAX_DEBUG_NANS=1: checks every operation, slowly") in machine_checks.environment()
    monkeypatch.setattr(machine_checks.os, "fsync", _fail)
    assert [finding.level for finding in machine_checks.disk(str(tmp_path))] == ["ERROR"] * 3


def _fail(descriptor: int) -> None:
    raise OSError(28, "No space left on device")
