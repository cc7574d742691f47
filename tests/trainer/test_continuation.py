"""A command line that is run again: its run goes on, another config is refused by name, other files are left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.callbacks.base import Callback
from jaxtrain.config.run_dir import write_config
from jaxtrain.errors import UserError
from jaxtrain.trainer.continuation import can_continue, is_scheduled

CONFIG = """
dir: {dir}/runs
simulate: 8
steps: 6
precision: fp32
layout: fsdp
model: {{embed: 16, layers: 1, heads: 2, mlp: 32}}
data:
  sources: [{{path: {dir}/text.txt}}]
  sequence: 16
  global_batch: 8
  validation_fraction: 0
  cache_dir: {dir}/cache
  workers: 1
checkpoint: {{every: 2}}
log: {{tensorboard: false}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("abcdefgh " * 200)
    (tmp_path / "config.yaml").write_text(CONFIG.format(dir=tmp_path))
    return tmp_path / "config.yaml"


def test_who_starts_the_same_line_again():
    assert not is_scheduled({"HOME": "/", "JAX_NUM_PROCESSES": "1", "SLURM_JOB_ID": ""})
    for name in ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID"):
        assert is_scheduled({name: "0"})
    assert is_scheduled({"JAX_NUM_PROCESSES": "2"})


def test_what_a_directory_holds(config: Path):
    loaded, directory = jaxtrain.load(config), config.parent / "runs/run"
    assert not can_continue(loaded, directory)
    (directory / "checkpoints").mkdir(parents=True)  # killed before it had written its config
    assert not can_continue(loaded, directory)
    (directory / "launch.secret.9f92bdc2cb298591").touch()  # another node of the job writes it at this moment
    (directory / "config.yaml.123.0a1b2c3d.tmp").touch()  # of a process that was killed in the middle
    assert not can_continue(loaded, directory)
    (directory / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds thesis\.tex and is not a run \(no config"):
        can_continue(loaded, directory)
    (directory / "thesis.tex").unlink()
    write_config(directory, loaded)
    assert can_continue(loaded, directory)
    other = jaxtrain.load(config, "optimizer.lr=1e-4", "mesh.fsdp=4", "name=other")
    with pytest.raises(UserError) as caught:
        can_continue(other, directory)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["mesh.data", "mesh.fsdp", "optimizer.lr"]
    assert all("expected the config of the run there, `jaxtrain resume" in line for line in lines)
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        can_continue(other, directory, ignored=["mesh"])
    assert can_continue(jaxtrain.load(config, "mesh.fsdp=4"), directory, ignored=["mesh"])


def test_the_same_call_goes_on_and_then_has_nothing_left_to_do(config: Path):
    loaded, directory = jaxtrain.load(config), config.parent / "runs/run"

    class KilledError(Exception):
        pass

    class Kill(Callback):
        def after_save(self, trainer, state, step):
            if step == 4:
                trainer.checkpointer.wait()
                raise KilledError

    with pytest.raises(KilledError):
        jaxtrain.train(loaded, resume="auto", callbacks=[Kill()])
    for _ in range(2):
        result = jaxtrain.train(loaded, resume="auto")
        assert (result.run_dir, result.step) == (directory, 6)
    kinds = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in kinds if event["kind"] == "resume"] == [4, 6]
    steps = [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="seed: 0 -> 1; expected the config of the run there"):
        jaxtrain.train(jaxtrain.load(config, "seed=1"), resume="auto")
    assert jaxtrain.train(loaded).run_dir == directory.with_name("run-2")
