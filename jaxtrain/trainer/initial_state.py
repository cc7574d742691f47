"""State of step 0: random, or with initial values from elsewhere."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.checkpoint.initial_weights import OrbaxWeights
from jaxtrain.config.sections.model import InitialWeightsConfig
from jaxtrain.core.initial_weights import replace_weights
from jaxtrain.core.program import State
from jaxtrain.core.state import all_parameters, split_parameters
from jaxtrain.distributed.multihost import is_same
from jaxtrain.errors import UserError
from jaxtrain.interop.array_weights import ArrayWeights, safetensors_weights, tree_weights
from jaxtrain.interop.config_json import read_model_config
from jaxtrain.interop.load_weights import load_weights
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
from jaxtrain.interop.weight_matching import StoredWeights
from jaxtrain.trainer.training_run import TrainingRun


def initial_state(trainer: TrainingRun, info: dict[str, Any]) -> State:
    """Builds the state of step 0.

    Values come from the seed, or from the module instance that is the model. Those of `model.from`, of `model.weights`
    and of the tree of weights then take their place, later ones that of earlier ones. Adds what was found to `info`,
    the fields of the start event, as `weights`.

    Raises:
        UserError: values cannot be read, do not fit the model, or differ between processes.
    """
    program = trainer.program
    model, components = program.config.model, program.components
    steps = []
    if program.model_def.instance is not None:
        _check_equal(tree_weights(program.model_def.instance, "model"))
    if model.from_ is not None:
        steps.append(partial(_from_huggingface, Path(os.path.expanduser(model.from_)), program.one))
    if model.weights.path is not None:
        steps.append(partial(_from_stored, trainer, info, open_weights(model.weights.path), model.weights))
    if components.weights is not None:
        tree = tree_weights(components.weights, "weights")
        _check_equal(tree)
        steps.append(partial(_from_stored, trainer, info, tree, model.weights))

    def replace(variables: State) -> State:
        for step in steps:
            variables = step(variables)
        return variables

    return program.init(replace) if steps else program.init()


def check_exists(path: str) -> None:
    """Raises UserError if a local file or folder of weights does not exist, before a run's folder is made."""
    if "://" not in path and not os.path.exists(os.path.expanduser(path)):
        raise UserError(f"model.weights: {path} does not exist; expected a run, a folder of orbax, or safetensors")


def open_weights(path: str) -> StoredWeights:
    """Opens a run, whose newest good checkpoint is taken, a folder that orbax wrote, or safetensors.

    Raises:
        UserError: none of these.
    """
    local = Path(os.path.expanduser(path))
    if local.suffix == ".safetensors" or list(local.glob("*.safetensors")):
        return safetensors_weights(local)
    if not (local / "config.yaml").is_file():
        return OrbaxWeights(path if "://" in path else str(local.absolute()))
    reader = CheckpointReader(local / "checkpoints")
    step = reader.latest_good()
    if step is None:
        raise UserError(f"model.weights: no usable checkpoint in {reader.directory}; expected a run with one")
    manifest = reader.store.marker(step)["manifest"]
    strategy = manifest.get("config", {}).get("sync", {}).get("strategy", "bsp")
    if strategy != "bsp" and manifest.get("mesh", {}).get("replica", 1) > 1:
        expected = "expected its export (`jaxtrain export`), or a run of bsp"
        raise UserError(f"model.weights: {local} is a run of {strategy}, whose replicas differ; {expected}")
    return OrbaxWeights(str(reader.store.path(step).absolute()))


def _from_huggingface(folder: Path, abstract: State, variables: State) -> State:
    mappings = TENSOR_MAPPINGS[read_model_config(folder)[0].name]
    for leaf in jax.tree.leaves(all_parameters(variables)):
        leaf.delete()  # frees memory for the imported weights
    return variables | split_parameters(load_weights(folder, mappings, all_parameters(abstract)), abstract)


def _from_stored(
    trainer: TrainingRun, info: dict[str, Any], stored: StoredWeights, config: InitialWeightsConfig, variables: State
) -> State:
    variables, match = replace_weights(variables, trainer.program.one, stored, config)
    count = len(match.found) + len(match.missing) + len(match.reshaped)
    rest = f"; {match.text}" if match.text else ""
    trainer.console.print(f"weights   {len(match.found)} of {count} variables from {stored.source}{rest}")
    names = {"found": sorted(match.found), "missing": match.missing, "reshaped": match.reshaped}
    info.setdefault("weights", []).append({"source": stored.source, **names, "unused": match.unused})
    return variables


def _check_equal(weights: ArrayWeights) -> None:
    """Raises UserError if the values differ between processes."""
    if not is_same(weights.digest):
        raise UserError(
            f"{weights.source}: the values differ between processes; expected the same, such as of one seed"
        )
