"""Initial values of plain modules: of an instance, a tree, a folder of orbax, safetensors, another run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import conformance
import jax
import nnx_modules
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from linen_modules import LinenConvNet
from rich.console import Console
from safetensors.numpy import save_file

import jaxtrain
from jaxtrain.distributed import multihost
from jaxtrain.errors import UserError
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trainer.initial_state import initial_state


def config(tmp_path: Path, name: str, *overrides: str) -> Any:
    return conformance.config(
        name, "layout=fsdp", "steps=2", f"dir={tmp_path}", "name=run", *conformance.MODULES[name], *overrides
    )


class FirstState(jaxtrain.callbacks.base.Callback):
    """Keeps a copy of the state of step 0."""

    def setup(self, trainer: Any) -> None:
        self.state = jax.tree.map(np.asarray, initial_state(trainer, {}))


def start(cfg: Any, **objects: Any) -> tuple[dict[str, np.ndarray], Any, str]:
    """Trains. Returns the first parameters and mutable variables by path, the result and what was printed."""
    first, text = FirstState(), StringIO()
    console = ConsoleTracker(cfg.steps, console=Console(file=text, width=200))
    result = jaxtrain.train(cfg, console=console, callbacks=[first], **objects)
    state = {kind: first.state[kind] for kind in ("params", "frozen", "mutable") if kind in first.state}
    return (
        {path: leaf for tree in state.values() for path, leaf in flatten_dict(tree, sep="/").items()},
        result,
        text.getvalue(),
    )


def instance(seed: int = 7) -> nnx.Module:
    return nnx_modules.ConvNet(rngs=nnx.Rngs(seed))


def values(module: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.RngState)))
    return {"/".join(map(str, path)): np.asarray(variable.get_raw_value()) for path, variable in flat}


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_an_instance_gives_the_initial_values_and_trains_as_flax_and_optax_alone(tmp_path: Path):
    model = instance()
    found, result, _ = start(config(tmp_path, "ConvNet"), model=model)
    assert_equal(found, values(model))
    assert_equal(values(model), values(instance()))  # it is not changed
    placed = result.program.state["params"]["conv"]["kernel"]
    assert result.state["params"]["conv"]["kernel"].sharding == placed.sharding

    tx = optax.sgd(0.05, momentum=result.program.config.optimizer.betas[0])
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    for step in range(2):
        batch = conformance.batch(step)

        def loss(model: nnx.Module, batch: Any = batch) -> Any:
            (total, weight), *_ = nnx_modules.weighted_cross_entropy(model, batch, jax.random.key(0)).values()
            return total / weight

        optimizer.update(model, nnx.grad(loss)(model))
    after = {"params": result.state["params"], "mutable": result.state["mutable"]}
    for path, value in values(model).items():
        kind = "params" if path in flatten_dict(after["params"], sep="/") else "mutable"
        np.testing.assert_allclose(flatten_dict(after[kind], sep="/")[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["class", "function", "lambda", "linen instance"])
def test_a_python_object_is_the_model(tmp_path: Path, kind: str):
    name = "LinenConvNet" if kind == "linen instance" else "ConvNet"
    model = {
        "class": nnx_modules.ConvNet, "function": nnx_modules.make_convnet,
        "lambda": lambda rngs: nnx_modules.ConvNet(rngs=rngs), "linen instance": LinenConvNet(),
    }[kind]  # fmt: skip
    _, named, _ = start(config(tmp_path, name))
    _, found, _ = start(config(tmp_path, name, "model.type=not_there:Other", "name=object"), model=model)
    for a, b in zip(jax.tree.leaves(named.state), jax.tree.leaves(found.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_object_that_is_no_model_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match="model: expected a class, a function of `rngs` or a Flax module; found int"):
        start(config(tmp_path, "ConvNet"), model=3)


@pytest.mark.parametrize("form", ["module", "state", "dict", "flat paths"])
def test_a_tree_gives_the_initial_values(tmp_path: Path, form: str):
    model = instance()
    state = nnx.state(model)
    tree = {
        "module": model, "state": state, "dict": nnx.to_pure_dict(state), "flat paths": values(model)
    }[form]  # fmt: skip
    found, _, text = start(config(tmp_path, "ConvNet"), weights=tree)
    assert_equal(found, values(model))
    assert f"weights   {len(found)} of {len(found)} variables from weights" in text


@pytest.mark.parametrize("form", ["state", "pure dict", "train state", "manager", "v1"])
def test_a_folder_of_orbax_gives_the_initial_values(tmp_path: Path, form: str):
    model, folder = instance(), tmp_path / "stored"
    state = nnx.state(model, nnx.Not(nnx.RngState))
    pure = nnx.to_pure_dict(state)
    if form == "manager":
        with orbax.checkpoint.CheckpointManager(folder) as manager:
            manager.save(3, args=orbax.checkpoint.args.StandardSave(pure))
        folder /= "3"
    elif form == "v1":
        orbax.checkpoint.v1.save(folder, pure)
    else:
        moments = {"mu": jax.tree.map(np.zeros_like, pure), "nu": jax.tree.map(np.zeros_like, pure)}
        tree = {"state": state, "pure dict": pure, "train state": {"params": pure, "opt_state": [moments], "step": 3}}
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, tree[form])
    found, _, _ = start(config(tmp_path, "ConvNet", f"model.weights={folder}"))
    assert_equal(found, values(model))


def test_linen_collections_of_orbax(tmp_path: Path):
    model = LinenConvNet()
    variables = model.init(jax.random.key(3), conformance.batch(0)["image"], train=False)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stored", variables)
    found, _, _ = start(config(tmp_path, "LinenConvNet", f"model.weights={tmp_path / 'stored'}"))
    expected = {
        path: np.asarray(leaf) for tree in variables.values() for path, leaf in flatten_dict(tree, sep="/").items()
    }
    assert_equal(found, expected)


def test_another_run_gives_the_initial_values(tmp_path: Path):
    _, first, _ = start(config(tmp_path, "ConvNet", "seed=3"))
    found, _, _ = start(config(tmp_path, "ConvNet", f"model.weights={first.run_dir}", "name=second", "layout=ddp"))
    for kind in ("params", "mutable"):
        for path, leaf in flatten_dict(first.state[kind], sep="/").items():
            np.testing.assert_array_equal(found[path], leaf)


def torch_like(model: nnx.Module) -> dict[str, np.ndarray]:
    """The values under the names, and in the layout, that torch has for them."""
    names = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
    stored = {}
    for path, value in values(model).items():
        *parents, last = path.split("/")
        order = {4: (3, 2, 0, 1), 2: (1, 0)}.get(value.ndim) if last == "kernel" else None
        value = value if order is None else value.transpose(order)
        stored[".".join([*parents, names.get(last, last)])] = np.ascontiguousarray(value)
    return stored


NAMES = (
    "model.weights.names={'(.*)conv/kernel': {name: '\\1conv.weight', dims: [2, 3, 1, 0]}, "
    "'(.*)/kernel': {name: '\\1.weight', dims: [1, 0]}, '(.*)/scale': '\\1.weight', '(.*)/mean': '\\1.running_mean', "
    "'(.*)/var': '\\1.running_var'}"
)


@pytest.mark.parametrize("is_folder", [False, True])
def test_safetensors_by_a_map_of_paths(tmp_path: Path, is_folder: bool):
    model, folder = instance(), tmp_path / "stored"
    folder.mkdir()
    save_file(torch_like(model), folder / "model.safetensors")
    path = folder if is_folder else folder / "model.safetensors"
    found, result, _ = start(config(tmp_path, "ConvNet", f"model.weights.path={path}", NAMES))
    assert_equal(found, values(model))
    saved = jaxtrain.load(result.run_dir / "config.yaml")  # the run is resumed from its checkpoint
    assert saved.model.weights.path == str(path)


def test_a_stack_is_loaded_layer_by_layer(tmp_path: Path):
    found, _, _ = start(config(tmp_path, "ScannedMLP"))
    stacked = next(path for path in found if path.endswith("kernel") and found[path].ndim == 3)
    prefix = stacked.removesuffix("/kernel")
    wanted = {path: np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32) for path, leaf in found.items()}
    stored = {}
    for path, value in wanted.items():
        if path.startswith(prefix):
            for index, part in enumerate(value):
                name = f"blocks.{index}.{path.removeprefix(prefix + '/')}"
                stored[name] = np.ascontiguousarray(part.T)
        else:
            stored[path.replace("/", ".")] = value
    save_file(stored, tmp_path / "w.safetensors")
    names = f"model.weights.names={{'{prefix}/kernel': {{name: 'blocks.{{index}}.kernel', dims: [1, 0]}}, " + (
        f"'{prefix}/(.*)': 'blocks.{{index}}.\\1'}}"
    )
    again, _, _ = start(
        config(tmp_path, "ScannedMLP", f"model.weights.path={tmp_path / 'w.safetensors'}", names, "name=b")
    )
    assert_equal(again, wanted)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "stored", stored)
    again, _, _ = start(config(tmp_path, "ScannedMLP", f"model.weights.path={tmp_path / 'stored'}", names, "name=c"))
    assert_equal(again, wanted)


def test_a_partial_match_is_refused_or_listed(tmp_path: Path):
    stored = values(instance())
    head = sorted(path for path in stored if path.startswith("head"))
    changed = {path: value for path, value in stored.items() if path not in head} | {
        "head/kernel": np.ones((2, 2), np.float32), "extra/kernel": np.ones(3, np.float32)
    }  # fmt: skip
    with pytest.raises(UserError) as error:
        start(config(tmp_path, "ConvNet"), weights=changed)
    line = str(error.value)
    assert "1 not stored: head/bias" in line
    assert "head/kernel" in line
    assert "stored but unused: extra/kernel" in line
    assert line.endswith("expected the same, or model.weights.strict=false")
    assert "\n" not in line

    found, result, text = start(config(tmp_path, "ConvNet", "model.weights.strict=false", "name=b"), weights=changed)
    fresh, _, _ = start(config(tmp_path, "ConvNet", "name=c"))
    assert_equal(found, {path: fresh[path] if path in head else stored[path] for path in stored})
    assert f"weights   {len(stored) - 2} of {len(stored)} variables" in text
    assert "head/bias" in text
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    (event,) = events[0]["weights"]
    assert event["missing"] == ["head/bias"]
    assert event["unused"] == ["extra/kernel"]
    assert event["reshaped"] == ["head/kernel [8, 4], stored [2, 2]"]
    assert set(event["found"]) == set(stored) - set(head)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nowhere", "nowhere does not exist; expected a run, a folder of orbax, or safetensors"),
        ("{path: ., names: {'(': a}}", r"model.weights.names: \(: .*expected a regular expression"),
        ("{path: ., names: {'.*': other}}", "not stored: "),
        (".", "is no checkpoint of orbax"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, value: str, message: str):
    source = tmp_path / "empty"
    source.mkdir()
    if "names" in value:
        save_file({"a": np.ones(3, np.float32)}, source / "model.safetensors")
    value = value.replace("path: .", f"path: {source}").replace("^.$", str(source))
    value = str(source) if value == "." else value
    with pytest.raises(UserError, match=message) as error:
        start(config(tmp_path, "ConvNet", f"model.weights={value}"))
    assert "\n" not in str(error.value)
    assert value != "nowhere" or not (tmp_path / "run").exists()


def test_values_that_differ_between_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxtrain.trainer.initial_state.is_same", lambda digest: False)
    with pytest.raises(UserError, match="model: the values differ between processes; expected the same"):
        start(config(tmp_path, "ConvNet"), model=instance())
    with pytest.raises(UserError, match="weights: the values differ between processes"):
        start(config(tmp_path, "ConvNet", "name=b"), weights=instance())


def test_digests_are_compared_across_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for other, expected in ((b"ab", True), (b"ac", False)):
        gather = lambda row, other=other: np.stack([row, np.frombuffer(other, np.uint8)])  # noqa: E731
        monkeypatch.setattr(multihost.multihost_utils, "process_allgather", gather)
        assert multihost.is_same(lambda: b"ab") is expected


def test_the_average_begins_at_the_given_values(tmp_path: Path):
    model, first = instance(), FirstState()
    jaxtrain.train(config(tmp_path, "ConvNet", "optimizer.ema_decay=0.9"), callbacks=[first], model=model)
    np.testing.assert_array_equal(first.state["ema"]["conv"]["kernel"], values(model)["conv/kernel"])


SCRIPT = """
import sys
import conformance, nnx_modules
from flax import nnx
import jaxtrain
from jaxtrain.errors import UserError

config = conformance.config(
    "ConvNet", "layout=fsdp", "mesh={fsdp: 4}", "steps=2", "dir=" + sys.argv[1], *conformance.MODULES["ConvNet"]
)
try:
    if sys.argv[3] == "initialize":
        jaxtrain.initialize()
    result = jaxtrain.train(config, model=nnx_modules.ConvNet(rngs=nnx.Rngs(int(sys.argv[2]))))
    print("loss", result.metrics["loss"])
except UserError as error:
    print("refused", error)
"""


@pytest.mark.parametrize(("seeds", "when"), [((7, 7), "initialize"), ((7, 8), "initialize"), ((7, 7), "too late")])
def test_an_instance_of_two_processes_must_be_the_same(tmp_path: Path, seeds: tuple[int, int], when: str):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    common = {
        "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "2",
        "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), str(seed), when], stdout=subprocess.PIPE, text=True,
            env={**os.environ, **common, "JAX_PROCESS_ID": str(index)},
        )
        for index, seed in enumerate(seeds)
    ]  # fmt: skip
    lines = [process.communicate(timeout=240)[0].splitlines()[-1] for process in processes]
    if when == "too late":
        assert all(line.startswith("refused 2 processes: JAX runs already in this one alone; ") for line in lines), (
            lines
        )
        return
    if seeds[0] != seeds[1]:
        assert all(line.startswith("refused model: the values differ between processes") for line in lines), lines
        return
    _, alone, _ = start(config(tmp_path, "ConvNet", "name=alone", "layout=ddp"), model=instance(7))
    for line in lines:
        assert float(line.removeprefix("loss ")) == pytest.approx(alone.metrics["loss"], rel=1e-5)
