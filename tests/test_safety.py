"""What SECURITY.md says: no pickle on a load path, paths that stay where they belong, secrets that stay in memory."""

from __future__ import annotations

import ast
import io
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import jaxtrain
from jaxtrain.cli.main import main
from jaxtrain.config import ConfigError
from jaxtrain.errors import UserError
from jaxtrain.trackers.console import ConsoleTracker

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jaxtrain").rglob("*.py"))

# Modules that run what a file says, and calls that do.
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch"}
UNSAFE_CALLS = {("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system"), ("np", "fromregex")}


def test_no_module_that_unpickles_is_imported_and_nothing_is_evaluated():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not UNSAFE_MODULES & {name.split(".")[0] for name in names}, where
            if isinstance(node, ast.Call):
                assert not (isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec")), where
                if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
                    assert (node.func.value.id, node.func.attr) not in UNSAFE_CALLS, where
                assert not any(word.arg in ("allow_pickle", "trust_remote_code", "shell") for word in node.keywords), (
                    where
                )


UNPICKLING = """
import io, pickle, sys
from pathlib import Path
import numpy as np, jax, jax.numpy as jnp
from jaxtrain.checkpoint import Checkpointer, CheckpointReader
from jaxtrain.checkpoint.durable import FolderTier, fetch_step
from jaxtrain.checkpoint.store import CheckpointStore
import jaxtrain
from jaxtrain.data import open_dataset
place = Path(sys.argv[1])
state = {"w": jnp.arange(1 << 12, dtype=jnp.float32), "step": jnp.int32(3)}
with Checkpointer(place / "run", durable=str(place / "far")) as checkpoints:
    checkpoints.save(1, state, manifest={"config": {}})
    checkpoints.finish()
config = jaxtrain.load(place / "config.yaml")
open_dataset(config.data, 0)

def refuse(*args, **kwargs):
    raise AssertionError("something is unpickled")

class Refused(pickle.Unpickler):
    load = refuse

import _pickle
for module in (pickle, _pickle):
    module.load = module.loads = refuse
    module.Unpickler = Refused
like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
found, _ = CheckpointReader(place / "run").restore(None, like)
np.testing.assert_array_equal(found["w"], state["w"])
fetch_step(FolderTier(place / "far"), 1, CheckpointStore(place / "run" / "x"))
config = jaxtrain.load(place / "config.yaml")
assert open_dataset(config.data, 0).batch(0, slice(0, 2))["tokens"].shape == (2, 64)
try:
    pickle.loads(pickle.dumps(1))
except AssertionError:
    print("refused")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A corpus and the config of a small run on it."""
    place = tmp_path_factory.mktemp("safety")
    (place / "corpus").mkdir()
    rng = random.Random(1)
    for index in range(80):
        text = " ".join(rng.choice("abcdefgh") * rng.randint(1, 9) for _ in range(rng.randint(10, 300)))
        (place / "corpus" / f"{index}.txt").write_text(text)
    (place / "config.yaml").write_text(f"""
name: run
dir: {place}/runs
simulate: 8
steps: 4
precision: fp32
layout: fsdp
model: {{embed: 32, layers: 1, heads: 2, mlp: 64}}
data:
  sources: [{{path: {place}/corpus}}]
  sequence: 64
  global_batch: 8
  validation_fraction: 0.1
  cache_dir: {place}/cache
  workers: 1
checkpoint: {{every: 1, keep: 2, durable: {place}/far, durable_every: 2}}
eval: {{batches: 1}}
""")
    return place


def test_restoring_and_reading_data_unpickle_nothing(place, tmp_path):
    shutil.copy(place / "config.yaml", tmp_path / "config.yaml")
    done = subprocess.run([sys.executable, "-c", UNPICKLING, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("refused")


@pytest.mark.parametrize("name", ["../out", "a/../../b", "/tmp/x", "..", ".hidden", "a/b", ""])
def test_the_name_of_a_run_stays_in_its_folder(name):
    with pytest.raises(ConfigError, match="name"):
        jaxtrain.load(None, base={"name": name})


@pytest.mark.parametrize(
    ("key", "value", "place"),
    [
        ("checkpoint.durable", "s3://AKIA:hunter2secret@bucket/runs", "checkpoint.durable"),
        ("data.sources", "[{path: 'https://me:hunter2secret@data.example/a.jsonl'}]", "data.sources.0.path"),
        ("data.options.url", "ftp://:hunter2secret@host", "data.options.url"),
        ("checkpont.durable", "s3://AKIA:hunter2secret@bucket", "checkpont.durable"),
        ("simulate", "s3://AKIA:hunter2secret@bucket", "simulate"),
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(tmp_path, key, value, place, capsys):
    assert main(["train", str(ROOT / "configs/quickstart.yaml"), f"dir={tmp_path}/runs", f"{key}={value}"]) == 2
    section, _, name = key.partition(".")
    (tmp_path / "mine.yaml").write_text(f"dir: {tmp_path}/runs\n{section}: {{{name or 'x'}: {value!r}}}")
    assert main(["plan", str(tmp_path / "mine.yaml")]) == 2
    said = "".join(capsys.readouterr())
    assert "hunter2secret" not in said
    assert f"{place}: holds a password, which would be saved with the run" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "url", ["s3://bucket/a:b@c", "https://host:8080/path", "gs://me@bucket", "a:b@c", "hf://a/b@main"]
)
def test_a_url_without_a_password_is_none(url):
    config = jaxtrain.load(None, base={"checkpoint": {"durable": url}})
    assert config.checkpoint.durable == url


SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef-wandb-secret", "HF_TOKEN": "hf_SecretSecretSecret",
    "AWS_SECRET_ACCESS_KEY": "aws/Secret+Key", "MLFLOW_TRACKING_PASSWORD": "mlflow-secret",
    "JAXTRAIN_SECRET": "the-secret-of-a-job", "SOME_OTHER_SETTING": "a-value-that-nobody-asked-for",
}  # fmt: skip


def test_secrets_of_the_environment_stay_there_and_a_lost_folder_comes_back(place, monkeypatch, capsys):
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    text = io.StringIO()

    def screen() -> ConsoleTracker:
        return ConsoleTracker(6, console=Console(file=text, width=400), live=False)

    jaxtrain.train(jaxtrain.load(place / "config.yaml"), console=screen())
    run, far = place / "runs/run", place / "far/run"
    assert sorted(int(path.name) for path in far.iterdir() if path.name.isdecimal()) == [2, 4]
    assert main(["checkpoint", "verify", str(run), "--durable"]) == 0
    assert main(["checkpoint", "inspect", str(run), "--json"]) == 0
    assert main(["config", str(run / "config.yaml")]) == 0
    assert main(["report", str(run)]) == 0
    with pytest.raises(UserError, match="already holds a run"):
        jaxtrain.train(jaxtrain.load(place / "config.yaml"), run_dir=run, console=screen())
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match=f"{far} already holds a run"):
        jaxtrain.train(jaxtrain.load(place / "config.yaml"), run_dir=run, console=screen())
    result = jaxtrain.train(jaxtrain.load(run / "config.yaml", "steps=5"), run_dir=run, resume=True, console=screen())
    assert result.step == 5
    said = text.getvalue() + "".join(capsys.readouterr())
    assert f"checkpoint 4 fetched from {far}" in said
    assert f"restored  checkpoint 4 of {far}" in said
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["restored"] for event in events if event["kind"] == "resume"] == [str(far)]
    assert [event["step"] for event in events if event["kind"] == "copy"] == [2, 4, 5]
    written = [path for root in (run, far, place / "cache") for path in root.rglob("*") if path.is_file()]
    assert len(written) > 30
    assert {"config.yaml", "events.jsonl", "jaxtrain.json"} <= {path.name for path in written}
    for name, secret in SECRETS.items():
        assert secret not in said, name
        assert not [path for path in written if secret.encode() in path.read_bytes()], name
