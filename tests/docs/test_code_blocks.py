"""Every block of README and docs is run, read, or marked as output."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks, commands, joined

from jaxtrain.cli import main as command_line
from jaxtrain.cli.examples import EXAMPLES
from jaxtrain.config.load import resolve
from jaxtrain.planning.hardware.targets import parse as parse_target
from jaxtrain.planning.target_config import config_for_target

# Blocks in these pages are run by tests of their own.
ELSEWHERE = {"docs/own-models.md": "flax_modules/test_own_models_page.py"}
KINDS = {"python", "sh", "bash", "yaml", "toml", "mermaid", "text", ""}
# Tests that read the scripts (`bash`) of a page.
SCRIPTS = {"docs/islands.md": ("launch/test_slurm_islands.py", "launch/test_container_islands.py")}
ALL_COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
# In a folder with this file `quickstart` is a small config; the shipped one is the same but for sizes.
SMALL = """
name: quickstart
simulate: 8
steps: 4
precision: fp32
layout: 3d
mesh: {data: 2, fsdp: 2, model: 2}
model: {embed: 32, layers: 2, heads: 4, kv_heads: 2, mlp: 64}
data: {sources: [texts], sequence: 32, global_batch: 16, validation_fraction: 0.3, cache_dir: cache}
optimizer: {name: adamw, lr: 4.0e-3}
checkpoint: {every: 4}
eval: {every: 4, batches: 1}
log: {sample_tokens: 8}
"""
# Written before the blocks of a page, for the names that they take as given.
GIVEN = {
    "docs/optimizers.md": "import jaxtrain, optax\nconfig = 'quickstart'\n",
    "docs/python.md": "config = {'data': {'global_batch': 32}, 'simulate': 8}\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return filled(tmp_path_factory.mktemp("pages"))


def filled(path: Path) -> Path:
    (path / "quickstart").write_text(SMALL)
    (path / "texts").mkdir()
    for index in range(12):
        (path / "texts" / f"{index}.txt").write_text(f"def number_{index}():\n    return {index}\n" * 40)
    return path


def environment() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    return env | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_tested(page: str):
    for block in blocks(page):
        assert block.language in KINDS, f"{block}: mark output as `text`"
        for test in SCRIPTS[page] if block.language == "bash" else ():
            assert Path(page).name in (ROOT / "tests" / test).read_text(), block
        if block.language == "sh":
            for line in joined(block.text).splitlines():
                assert re.match(r"\s*(#|jaxtrain |make |python |srun jaxtrain |pip |$)", line), block


def test_pages_that_are_run_elsewhere_are():
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text()


def short(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)[:60]


@pytest.mark.parametrize(("page", "words"), ALL_COMMANDS, ids=short)
def test_a_shown_command_is_one(page: str, words: list[str]):
    """The command line accepts it, its keys exist, and its file or target is there."""
    words = words[1:] if words[0] == "srun" else words
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif words[0] == "python":
        assert (ROOT / words[1]).exists(), words
    elif words[0] == "jaxtrain":
        given: dict[str, Any] = {}
        with patch.object(command_line, "_run", lambda name, args: given.update(vars(args)) or 0):
            assert command_line.main(words[1:]) == 0, words
        keys = [word for word in given.get("overrides") or () if word.split("=")[0] not in ("model.from",)]
        resolve(
            None,
            *(key for key in keys if not key.startswith("layout=")),
            paths=False,
            base={"simulate": 8, "mesh": {"data": -1}},
        )


PLANS = [words[2:] for _, words in ALL_COMMANDS if words[:2] == ["jaxtrain", "plan"]]
PLANS += [shlex.split(line) for line in EXAMPLES["plan"]]


@pytest.mark.parametrize(
    "words", [words for words in PLANS if words[0].startswith(("configs/", "models/", "--diff"))], ids=short
)
def test_a_shown_plan_fits_its_target(words: list[str]):
    """The shipped model has a layout that its rows and tensors can be split by, on the devices of the target."""
    given: dict[str, Any] = {}
    with patch.object(command_line, "_run", lambda name, args: given.update(vars(args)) or 0):
        assert command_line.main(["plan", *words]) == 0
    keys = [*([given["config"]] if given["diff"] else []), *given["overrides"]]
    for source in given["diff"] or [given["config"]]:
        name, *own = source.removeprefix("configs/").removesuffix(".yaml").split()
        config, _ = config_for_target(name, *own, *keys, target=parse_target(given["target"]))
        assert config.model.embed == {"models/gpt2": 768}.get(name, 4096)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_configs_in_pages_are_valid(page: str, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    for block in blocks(page):
        if block.language == "yaml":
            lines = block.text.splitlines()
            keys = [line.split(":")[0] for line in lines if re.match(r"\w", line)]
            for text in lines if len(set(keys)) < len(keys) else [block.text]:  # alternatives, one a line
                resolve(None, paths=False, base={"simulate": 8, "mesh": {"data": -1}} | yaml.safe_load(text))


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in ELSEWHERE and any(one.language == "python" for one in blocks(page))]
)
def test_python_in_pages_runs(page: str, folder: Path):
    code = GIVEN.get(page, "")
    for block in blocks(page):
        if block.language == "python":
            code += re.sub(r"steps=\d+", "steps=4", block.text) + "\n"
    name = f"{Path(page).stem.replace('-', '_')}_page.py"
    (folder / name).write_text(code)
    done = subprocess.run(
        [sys.executable, name], cwd=folder, env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]


def runnable() -> Iterator[list[str]]:
    """Commands on the quickstart and its runs that this machine can run, but for comparisons, which have own tests."""
    seen = set()
    for _, words in ALL_COMMANDS:
        target = words[2] if len(words) > 2 else ""
        target = words[3] if target in ("ls", "verify", "prune", "inspect") and words[1] == "checkpoint" else target
        on_quickstart = target in ("quickstart", "runs/quickstart", "runs/short") or words[1] in ("schedule", "init")
        if words[0] == "jaxtrain" and on_quickstart and words[1] not in ("verify", "launch") and str(words) not in seen:
            seen.add(str(words))
            yield words[1:]
            if words[1] == "init":
                yield [
                    "train",
                    f"{target}.yaml",
                    "steps=2",
                    "schedule.warmup_steps=1",
                    "eval.every=2",
                    "checkpoint.every=2",
                ]


def test_commands_on_the_quickstart_run(tmp_path: Path):
    folder = filled(tmp_path)
    order = [
        "config",
        "init",
        "train",
        "schedule",
        "plan",
        "report",
        "checkpoint",
        "eval",
        "generate",
        "export",
        "resume",
    ]
    words = sorted(runnable(), key=lambda one: order.index(one[0]))
    assert len(words) > 10
    assert {"config", "train", "resume", "report", "checkpoint", "plan", "schedule"} <= {one[0] for one in words}
    shorter = [re.sub(r"^steps=\d{2,}$", "steps=24", word) for one in words for word in [*one, "\0"]]
    lines = [line.split("\1") for line in "\1".join(shorter).strip("\0\1").split("\1\0\1")]
    script = "import sys, json\nfrom jaxtrain.cli.main import main\n"
    script += f"for words in {lines!r}:\n    print('RUN', *words, flush=True)\n    code = main(words)\n"
    script += "    assert code == 0, (words, code)\n"
    env = environment() | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    (folder / "commands.py").write_text(script)
    command = [sys.executable, "commands.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:]


SESSIONS = [one for page in PAGES for one in blocks(page) if re.match(r"\$ jaxtrain .*\njaxtrain: ", one.text)]


@pytest.mark.parametrize("block", SESSIONS, ids=str)
def test_a_refused_command_says_what_the_page_shows(block: Block, folder: Path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    command, said = block.text.split("\n", 1)
    assert command_line.main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err == said


def gallery() -> list[tuple[list[str], str]]:
    """Each command of the gallery with the output that follows it."""
    page = blocks("docs/gallery.md")
    return [(one.text.split()[1:], after.text) for one, after in pairwise(page) if one.language == "sh"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("words", "said"), gallery(), ids=short)
def test_the_gallery_finds_what_it_says(words: list[str], said: str, folder: Path):
    """In processes of their own, which simulate as many devices as the command says."""
    command = [sys.executable, "-m", "jaxtrain.cli.main", *words]
    env = environment() | {"COLUMNS": "300"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 1, done.stderr[-3000:]
    printed = done.stdout
    for line in said.strip().splitlines():
        assert line in printed, printed
