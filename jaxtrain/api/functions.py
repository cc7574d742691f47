"""Public functions of the package, which the commands use, too."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.api.launched_script import launched_devices
from jaxtrain.api.trainer import Trainer
from jaxtrain.config.run_dir import saved_config
from jaxtrain.core.components import components_of
from jaxtrain.core.placement import process_shard
from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.data.objects.shard import current_shard
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError
from jaxtrain.inference import eval_harness
from jaxtrain.inference import model as inference
from jaxtrain.trainer.run_training import Result
from jaxtrain.verification import report as report  # shows an outcome in notebooks
from jaxtrain.verification.outcome import Outcome
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
    runtime.start(launched_devices(simulate))


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
    run: str | Path, *overrides: str, step: int | None = None, batches: int | None = None,
    tasks: Sequence[str] | None = None, include_path: str | Path | None = None, limit: int | None = None,
    num_fewshot: int | None = None, **objects: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns the metrics of a run's checkpoint on its validation sets, with its `step`; or its scores on tasks.

    Args:
        run: folder of the run.
        overrides: `key=value` texts.
        step: step of the checkpoint; default: the newest good one.
        batches: batches of each set; default: `eval.batches`.
        tasks: names of tasks of lm-evaluation-harness, or of YAML files in `include_path`, in place of the sets.
        include_path: folder with more task files.
        limit: largest number of documents of each task.
        num_fewshot: examples before each document; default: the task's.
        objects: `model`, `loss`, `data`, `eval_data` or `optimizer` of a run of Python objects.

    Returns:
        {name: value}; of tasks `results` (task -> metric -> value), `versions` and more, as the harness names them.

    Raises:
        UserError: not a run, no usable checkpoint, no validation data, or an option that belongs to tasks.
    """
    options = {"include_path": include_path, "limit": limit, "num_fewshot": num_fewshot}
    unused = [name for name, value in options.items() if value is not None]
    if tasks is None and unused:
        raise UserError(f"evaluate: {unused[0]} is for tasks; expected tasks with it")
    for name, value, least in (("limit", limit, 1), ("num_fewshot", num_fewshot, 0)):
        if value is not None and value < least:
            raise UserError(f"evaluate: {name}: expected at least {least}; found {value}")
    if tasks is None:
        return inference.evaluate(Path(run), step, batches, overrides, components_of(evaluate, objects))
    folder = None if include_path is None else str(include_path)
    return eval_harness.evaluate_tasks(
        Path(run), step, overrides, tasks, include_path=folder, limit=limit, num_fewshot=num_fewshot
    )


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
        UserError: not a language model, an empty prompt, or an option out of range.
    """
    prompts, components = [prompt] if isinstance(prompt, str) else list(prompt), components_of(generate, objects)
    sampling = _sampling(prompts, tokens, seed, temperature, top_k, top_p)
    loaded = inference.load_model(Path(run), step, overrides, components)
    texts = list(inference.complete_prompts(*loaded, prompts, tokens, seed, **sampling))
    return texts[0] if isinstance(prompt, str) else texts


def stream(
    run: str | Path, prompt: str, *overrides: str, tokens: int = 100, step: int | None = None, seed: int = 0,
    temperature: float = 0.8, top_k: int | None = None, top_p: float | None = None, **objects: Any,
) -> Iterator[str]:  # fmt: skip
    """Returns the pieces of a prompt's continuation as they are generated, after the prompt itself.

    Args:
        run: folder of a run, or of a Hugging Face model.
        prompt: a text.
        overrides: `key=value` texts.
        tokens: largest number of new tokens.
        step: step of the checkpoint; default: the newest good one.
        seed: of the sampling.
        temperature: 0 takes the likeliest token.
        top_k: sample from so many likeliest tokens.
        top_p: sample from the likeliest tokens that have this probability together.
        objects: `model` or `optimizer` of a run of Python objects.

    Raises:
        UserError: not a language model, an empty prompt, or an option out of range.
    """
    sampling = _sampling([prompt], tokens, seed, temperature, top_k, top_p)
    loaded = inference.load_model(Path(run), step, overrides, components_of(stream, objects))
    return inference.text_streamer(*loaded, **sampling)(prompt, tokens, seed)


def _sampling(
    prompts: Sequence[str], tokens: int, seed: int, temperature: float, top_k: int | None, top_p: float | None
) -> dict[str, Any]:
    """Returns the options of a sampler. Raises UserError for one that is out of range, and for an empty prompt."""
    if not 0 <= temperature < math.inf or (top_p is not None and not 0 < top_p <= 1):
        raise UserError("generate: expected a finite temperature >= 0 and 0 < top_p <= 1")
    if tokens < 1 or (top_k is not None and top_k < 1):
        raise UserError("generate: expected tokens and top_k of at least 1")
    if not 0 <= seed < 2**32:
        raise UserError(f"generate: seed is {seed}; expected 0 to 4294967295")
    if not prompts or not all(prompts):
        raise UserError("generate: a prompt is empty; expected at least one character, such as a newline")
    return {"temperature": temperature, "top_k": top_k, "top_p": top_p}


def verify(
    config: ConfigSource, *overrides: str, layouts: Sequence[str] = ("all",), devices: int | None = None,
    steps: int = 3, inject: str | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
    **objects: Any,
) -> Outcome:  # fmt: skip
    """Compares losses, gradients and updates of a config's model on every layout with one device, in float32.

    Args:
        config: see `Trainer`.
        overrides: `key=value` texts.
        layouts: names of layouts, or `all`.
        devices: simulated devices; None: `simulate` of the config, or 8.
        steps: steps to compare.
        inject: name of a fault to inject into every layout, which the comparison has to find.
        progress: called with the number of layouts that are done, and of all.
        objects: `model`, `loss`, `data` or `optimizer` as Python objects.

    Raises:
        UserError: a bad config or layout.
    """
    if (devices is not None and devices < 1) or steps < 1:
        raise UserError("verify: expected at least 1 device and 1 step")
    return compare_layouts(
        config, *overrides, layouts=layouts, devices=devices, steps=steps, inject=inject, progress=progress,
        components=components_of(verify, objects),
    )  # fmt: skip
