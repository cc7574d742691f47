"""Every example runs in its quick form, as a user would start it, and reaches what a few steps reach."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
# The last figure that a quick form prints, and the interval in which it is right: well away from chance.
FIGURES = {
    "gpt_own_text": (r"eval/loss (\S+)", 2.0, 4.0),  # ln 256 is 5.5
    "image_classifier": (r"eval/accuracy (\S+)", 0.5, 1.0),
    "linen_vit": (r"eval/accuracy (\S+)", 0.3, 1.0),
    "diffusion": (r"eval/loss (\S+)", 0.1, 0.6),
    "contrastive": (r"eval/matched (\S+)", 0.1, 1.0),
    "own_optimizer": (r"eval/accuracy (\S+)", 0.3, 1.0),
    "own_loop": (r"eval/accuracy (\S+) after", 0.5, 1.0),
    "callback": (r"best eval/accuracy (\S+),", 0.5, 1.0),
    "hugging_face": (r"before, (\S+) after", 1.5, 4.5),
}


def script_files() -> list[Path]:
    return sorted(EXAMPLES.glob("*.py"))


def run_example(name: str, folder: Path, *arguments: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    env["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(folder), *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_example_is_run():
    assert [path.stem for path in script_files()] == sorted(FIGURES)


@pytest.mark.parametrize("path", script_files(), ids=lambda path: path.stem)
def test_an_example_is_one_short_file_that_tells_what_to_expect(path: Path):
    text = path.read_text()
    assert len(text.splitlines()) < 120
    told = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/{path.name}" in told
    assert re.search(r"^Expected.*\d", told, re.MULTILINE), "the docstring names no figure"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", FIGURES)
def test_the_quick_form_learns(name: str, tmp_path: Path):
    if name not in ("gpt_own_text", "hugging_face"):
        pytest.importorskip("sklearn")
    if name == "hugging_face":
        pytest.importorskip("transformers")
        pytest.importorskip("torch")
    pattern, least, most = FIGURES[name]
    printed = run_example(name, tmp_path, "--quick")
    figure = float(re.findall(pattern, printed)[-1])
    assert least <= figure <= most, printed[-2000:]
    if name == "diffusion":
        assert (tmp_path / "diffusion.png").stat().st_size > 1000
