"""EleutherAI's lm-evaluation-harness over our decoder, through the harness's own model interface."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.run_dir import saved_config
from jaxtrain.core.program import Program, build_program, model_from_config
from jaxtrain.core.resolve import resolve
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError
from jaxtrain.inference.generate import Generator, decoding_sharder, padded_rows
from jaxtrain.inference.model import WITHOUT_ROUNDS, load_params, text_tokenizer
from jaxtrain.inference.score import Scorer, scoring_sharder
from jaxtrain.io.atomic import write_atomic
from jaxtrain.models.spec import vocabulary_size

NEW_TOKENS = 256  # maximum of a generation if its task does not set one; the harness's default


@dataclass(frozen=True)
class HarnessModel:
    """Model for the harness: tokenizer, functions to score and generate. `longest`: maximum tokens of a row."""

    tokenizer: Tokenizer
    longest: int
    rows: int
    score: Callable[[Sequence[tuple[list[int], int]]], list[tuple[float, bool]]]
    generate: Callable[[Sequence[list[int]], int, dict[str, Any]], Iterator[list[int | None]]]


def evaluate_tasks(
    directory: Path, step: int | None, overrides: Sequence[str], tasks: Sequence[str], *,
    include_path: str | None = None, limit: int | None = None, num_fewshot: int | None = None, rows: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs tasks of the harness on a checkpoint. Returns `results` (task -> metric -> value), `versions` and others.

    Args:
        directory: run directory; its layout, or that of the overrides, shards the model.
        step: step of the checkpoint; None: the newest good one.
        overrides: `key=value`.
        tasks: names of the harness's tasks, or of YAML files in `include_path`.
        include_path: folder with more task files.
        limit: maximum documents of each task.
        num_fewshot: examples before each document; default: the task's.
        rows: rows of a batch; default: data.global_batch.

    Raises:
        UserError: the package is missing, an unknown task, not a run, or not a language model.
    """
    harness = _require()
    config, _ = resolve(saved_config(directory), *overrides, *WITHOUT_ROUNDS, paths=False)
    manager = harness.tasks.TaskManager(include_path=include_path)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown or not tasks:
        where = f" or in {include_path}" if include_path else "; --include-path DIR adds a folder of task files"
        raise UserError(f"--tasks: no task {', '.join(unknown)} in the harness{where}")
    if runtime.process_count() > 1:
        found = f"expected {runtime.PROCESSES}=1, found {runtime.process_count()}"
        raise UserError(f"eval --tasks runs in one process; {found}")
    tokenizer = text_tokenizer(config.model, config.data)
    program = build_program(config, vocabulary_size(config.model, tokenizer.vocab), runtime.start(config.simulate))
    params, _ = load_params(directory, step, program)
    model = open_harness_model(program, tokenizer, params, rows or config.data.global_batch)
    results = harness.evaluator.simple_evaluate(
        harness_adapter(model), tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=num_fewshot,
        log_samples=False, bootstrap_iters=0,
    )  # fmt: skip
    kept = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")
    return {key: results[key] for key in kept if key in results}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Writes results as JSON, atomically."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(results, indent=1, default=str) + "\n")


def _require() -> Any:
    """Imports `lm_eval` with its tasks and evaluator. Raises UserError if it is missing."""
    try:
        for name in ("lm_eval.tasks", "lm_eval.evaluator"):
            importlib.import_module(name)
        return importlib.import_module("lm_eval")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "jaxtrain":
            raise
        message = f"eval --tasks needs the package {error.name or 'lm_eval'}: pip install 'jaxtrain[lm-eval]'"
        raise UserError(message) from error


def open_harness_model(program: Program, tokenizer: Tokenizer, params: Any, rows: int) -> HarnessModel:
    """Builds a `HarnessModel` of weights, sharded by the program's layout."""
    config, vocab = program.config, program.model_def.parameters["embed"]["table"].shape[0]
    longest = config.data.sequence

    def defined(sharder: Any) -> Any:
        return model_from_config(config, sharder, vocab)

    sharder = scoring_sharder(program.sharder)
    scorer = Scorer(defined(sharder), sharder, longest, rows)
    decode_rows = padded_rows(program.sharder, rows)
    model_def, generators = defined(decoding_sharder(program.sharder, decode_rows)), {}

    def generate(prompts: Sequence[list[int]], tokens: int, sampling: dict[str, Any]) -> Iterator[list[int | None]]:
        key = tuple(sorted(sampling.items()))
        if key not in generators:
            generators[key] = Generator(model_def, tokenizer.vocab, **sampling)
        ids = [np.array(prompt, np.int32) for prompt in prompts]
        return generators[key].batch(params, ids, tokens, seed=config.seed, stops=tokenizer.stops, rows=decode_rows)

    return HarnessModel(tokenizer, longest, rows, lambda pairs: scorer(params, pairs), generate)


def harness_adapter(model: HarnessModel) -> Any:
    """Wraps a model as a `lm_eval.api.model.TemplateLM`."""
    api = importlib.import_module("lm_eval.api.model")
    utils = importlib.import_module("lm_eval.utils")
    tokenizer = model.tokenizer
    start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos

    class Adapter(api.TemplateLM):
        """Encodes texts unchanged, after the tokenizer's BOS if it has one."""

        eot_token_id = tokenizer.eos
        prefix_token_id = start
        max_length = model.longest

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = tokenizer.encode_batch([string])[0].tolist()
            return ids if tokenizer.bos is None or add_special_tokens is False else [tokenizer.bos, *ids]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return model.score([([*context, *text], len(text)) for _, context, text in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs, owner = [], []
            for index, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                options = {"prefix_token": start, "max_seq_len": model.longest, "context_len": 1}
                for window in utils.get_rolling_token_windows(ids, **options):
                    context, text = utils.make_disjoint_window(window)
                    pairs.append(([*context, *text], len(text)))
                    owner.append(index)
            totals = [0.0] * len(requests)
            for index, (score, _) in zip(owner, model.score(pairs)):
                totals[index] += score
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
            texts = [""] * len(requests)
            for indices in groups.values():
                ids = {index: self.tok_encode(requests[index].args[0]) or [start] for index in indices}
                indices.sort(key=lambda index: -len(ids[index]))
                for first in range(0, len(indices), model.rows):
                    some = indices[first : first + model.rows]
                    new = _generate_until(model, [ids[index] for index in some], requests[some[0]].args[1])
                    for index, text in zip(some, new):
                        texts[index] = text
            return texts

    return Adapter()


def _generate_until(model: HarnessModel, prompts: list[list[int]], options: dict[str, Any]) -> list[str]:
    """Generates texts up to the first stop word. `options` are the harness's and hold for all prompts."""
    until = options.get("until") or []
    stops = [word for word in ([until] if isinstance(until, str) else until) if word]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    tokens = int(next((options[name] for name in names if options.get(name) is not None), NEW_TOKENS))
    longest_prompt = model.longest - tokens
    if longest_prompt < 1:
        message = f"{model.longest} tokens are too few for {tokens} generated ones and a prompt"
        raise UserError(f"data.sequence: {message}; expected at least {tokens + 1}")
    does_sample = options.get("do_sample", float(options.get("temperature") or 0) > 0)
    sampling = {
        "temperature": float(options.get("temperature", 1.0)) if does_sample else 0.0,
        "top_k": options.get("top_k") if does_sample else None,
        "top_p": options.get("top_p") if does_sample else None,
    }
    ids: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    for step in model.generate([prompt[-longest_prompt:] for prompt in prompts], tokens, sampling):
        for row, token in enumerate(step):
            if token is not None and not any(stop in texts[row] for stop in stops):
                ids[row].append(token)
                texts[row] = model.tokenizer.decode(ids[row])
        if all(token is None or any(stop in text for stop in stops) for token, text in zip(step, texts)):
            break
    for stop in stops:
        texts = [text.split(stop)[0] for text in texts]
    return texts


def format_lines(results: dict[str, Any]) -> list[str]:
    """Returns a line for each metric of each task."""
    rows = [
        f"{task}  {name.removesuffix(',none')}  {value:.4f}"
        for task, scores in results["results"].items()
        for name, value in scores.items()
        if isinstance(value, float) and "_stderr" not in name
    ]
    return rows or ["no metric"]
