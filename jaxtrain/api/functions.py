"""Public functions of the package, which the commands use, too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtrain.api.trainer import Trainer
from jaxtrain.config.run_dir import saved_config
from jaxtrain.core.components import Components
from jaxtrain.core.placement import process_shard
from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.data.objects.shard import current_shard
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError
from jaxtrain.inference import model as inference
from jaxtrain.planning.hardware.targets import parse
from jaxtrain.planning.predict import predict
from jaxtrain.planning.result import Plan
from jaxtrain.planning.target_config import config_for_target
from jaxtrain.trainer.run_training import Result
from jaxtrain.verification.verify import Outcome
from jaxtrain.verification.verify import verify as compare_layouts


def initialize(simulate: int | None = None) -> None:
    """Starts JAX on the devices of a run, for scripts that create arrays or modules before `train`.

    `train` does it, too, if nothing has used JAX before. With several processes it joins them, as the environment
    says: JAX_COORDINATOR_ADDRESS (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID, which `jaxtrain launch` sets.

    Args:
        simulate: number of simulated CPU devices, over all processes; None: the devices of the machine.

    Raises:
        UserError: JAX runs already with other devices, or the environment is incomplete.
    """
    runtime.start(simulate)


def data_shard(config: ConfigSource = None, *overrides: str, **keys: Any) -> tuple[int, int]:
    """Returns (index, count) of the rows that this process reads of every batch, for data with `rows="local"`.

    Processes that hold the same rows (those of a tensor, context or pipeline group) have the same index and must read
    the same. Without arguments it is for use within the function that is given as `data`, or in the iterable that it
    returns: the shard of the run that reads it. Elsewhere it takes the config of the run, and starts JAX.

    Args:
        config: see `Trainer`.
        overrides: `key=value` texts.
        keys: sections or keys of the config.

    Returns:
        the index, from 0, and the number of shards; a local batch has `data.global_batch / count` rows.

    Raises:
        UserError: no run reads data here and no config is given, or the layout does not fit the devices.
    """
    if config is None and not overrides and not keys:
        shard = current_shard()
        if shard is None:
            expected = "expected a call within the function given as `data`, or the config of the run as arguments"
            raise UserError(f"data_shard: no run reads data here; {expected}")
    else:
        loaded = load_config(config, *overrides, **keys)
        shard = process_shard(loaded, runtime.start(loaded.simulate))
    return shard.index, shard.count


def train(config: ConfigSource = None, *overrides: str, **arguments: Any) -> Result:
    """Trains to `config.steps` and returns when the last checkpoint is on disk: `Trainer(...).fit()`.

    Args:
        config: see `Trainer`.
        overrides: `key=value` texts.
        arguments: objects, options, and sections or keys of the config, see `Trainer`.

    Returns:
        the outcome, with metrics, state and compiled program.

    Raises:
        UserError: bad input, one line for each problem.
        TrainingError: see `Trainer.fit`.
    """
    return Trainer(config, *overrides, **arguments).fit()


def resume(run: str | Path, *overrides: str, **objects: Any) -> Result:
    """Resumes a run from its newest good checkpoint and trains to its end.

    Args:
        run: folder of the run.
        overrides: `key=value` texts, such as `steps=2000` or another layout.
        objects: arguments of `Trainer`; the Python objects that the run has are given again.

    Raises:
        UserError: no such run, a change that it does not accept, or an object that is missing.
    """
    return train(saved_config(Path(run)), *overrides, run_dir=run, resume=True, **objects)


def evaluate(
    run: str | Path, *overrides: str, step: int | None = None, batches: int | None = None, **objects: Any
) -> dict[str, float]:
    """Returns the metrics of a run's checkpoint on its validation sets, with its `step`.

    Args:
        run: folder of the run.
        overrides: `key=value` texts.
        step: step of the checkpoint; default: the newest good one.
        batches: batches of each set; default: `eval.batches`.
        objects: `model`, `loss`, `data`, `eval_data` or `optimizer` of a run of Python objects.

    Raises:
        UserError: not a run, no usable checkpoint, or no validation data.
    """
    return inference.evaluate(Path(run), step, batches, overrides, Components(**objects))


def generate(
    run: str | Path, prompt: str | Sequence[str], *overrides: str, tokens: int = 100, step: int | None = None,
    seed: int = 0, temperature: float = 0.8, top_k: int | None = None, top_p: float | None = None, **objects: Any,
) -> str | list[str]:  # fmt: skip
    """Returns prompts with their continuations.

    Args:
        run: folder of a run, or of a Hugging Face model.
        prompt: a text, or several.
        overrides: `key=value` texts.
        tokens: largest number of new tokens.
        step: step of the checkpoint; default: the newest good one.
        seed: of the sampling.
        temperature: 0 takes the likeliest token.
        top_k: sample from so many likeliest tokens.
        top_p: sample from the likeliest tokens that have this probability together.
        objects: `model` or `optimizer` of a run of Python objects.

    Returns:
        a text for a text, a list for several.

    Raises:
        UserError: not a language model, or an empty prompt.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not all(prompts):
        raise UserError("generate: a prompt is empty; expected at least one character, such as a newline")
    loaded = inference.load_model(Path(run), step, overrides, Components(**objects))
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    texts = list(inference.complete_prompts(*loaded, prompts, tokens, seed, **sampling))
    return texts[0] if isinstance(prompt, str) else texts


def plan(config: ConfigSource, target: str, *overrides: str, slices: int | None = None, **keys: Any) -> Plan:
    """Plans memory, communication and speed of a config's step on hardware that need not be there.

    Args:
        config: see `Trainer`; its data need not exist.
        target: such as `h100:8x8` or `v5p:8x8x8`.
        overrides: `key=value` texts.
        slices: number of TPU slices.
        keys: sections or keys of the config.

    Raises:
        UserError: a bad config or target.
    """
    parsed = parse(target, slices)
    loaded, vocab = config_for_target(config, *overrides, target=parsed, **keys)
    return predict(loaded, vocab, str(parsed))


def verify(
    config: str | Path, *overrides: str, layouts: Sequence[str] = ("all",), devices: int = 8, steps: int = 3
) -> Outcome:
    """Compares losses, gradients and updates of a config's model on every layout with one device, in float32.

    Args:
        config: path of a YAML file, or name of a shipped config.
        overrides: `key=value` texts.
        layouts: names of layouts.
        devices: simulated devices.
        steps: steps to compare.

    Raises:
        UserError: a bad config or layout.
    """
    return compare_layouts(config, overrides, layouts=layouts, devices=devices, steps=steps)
