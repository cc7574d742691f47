"""EleutherAI's lm-evaluation-harness over our decoder, through the harness's own model interface."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.config.run_dir import saved_config
from jaxtrain.core.program import Program, build
from jaxtrain.core.resolve import resolve
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError
from jaxtrain.inference.generate import Generator, decoding_sharder, padded_rows
from jaxtrain.inference.model import load_params, text_tokenizer
from jaxtrain.inference.score import Scorer, scoring_sharder
from jaxtrain.models.decoder_params import vocabulary
from jaxtrain.models.definition import define, make_env

NEW_TOKENS = 256  # that a generation has at most, where its task does not say: as in the harness


@dataclass(frozen=True)
class HarnessModel:
    """What the harness's interface needs of a checkpoint. `longest`: tokens that are read at once."""

    tokenizer: Tokenizer
    longest: int
    rows: int
    score: Callable[[Sequence[tuple[list[int], int]]], list[tuple[float, bool]]]
    generate: Callable[[Sequence[list[int]], int, dict[str, Any]], Iterator[list[int | None]]]


def evaluate_tasks(
    directory: Path, step: int | None, overrides: Sequence[str], tasks: Sequence[str], *,
    include_path: str | None = None, limit: int | None = None, num_fewshot: int | None = None, rows: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The harness's results of a checkpoint: `results`, task -> metric -> value, `versions`, `n-samples` and others.

    Args:
        directory: of the run; its layout, or that of the overrides, shards the model.
        tasks: names of the harness's own, or of YAML files in `include_path`.
        limit: documents of each task at most.
        num_fewshot: examples before each; default: the task's.
        rows: of a batch; default: data.global_batch.

    Raises:
        UserError: the package is missing, no such task, not a run or not one of a language model.
    """
    harness = _require()
    config, _ = resolve(saved_config(directory), *overrides, paths=False)
    known = harness.tasks.TaskManager(include_path=include_path)
    unknown = [task for task in tasks if task not in known.all_tasks]
    if unknown or not tasks:
        where = f" or in {include_path}" if include_path else "; --include-path DIR adds a folder of task files"
        raise UserError(f"--tasks: no task {', '.join(unknown)} in the harness{where}")
    if runtime.processes() > 1:
        raise UserError(f"eval --tasks runs as one process; {runtime.PROCESSES} says {runtime.processes()}")
    tokenizer = text_tokenizer(config)
    program = build(config, vocabulary(config, tokenizer.vocab), runtime.start(config))
    params, _ = load_params(directory, step, program)
    model = open_harness_model(program, tokenizer, params, rows or config.data.global_batch)
    found = harness.evaluator.simple_evaluate(
        harness_adapter(model), tasks=list(tasks), task_manager=known, limit=limit, num_fewshot=num_fewshot,
        log_samples=False, bootstrap_iters=0,
    )  # fmt: skip
    kept = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples")
    return {key: found[key] for key in kept if key in found}


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Results as JSON, replaced at once."""
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def _require() -> Any:
    """The package `lm_eval`, its tasks and evaluator loaded. Raises UserError where it is missing."""
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
    """Scores and generations of these weights, sharded by the program's layout."""
    config, vocab = program.config, program.definition.params["embed"]["table"].shape[0]
    longest = config.data.sequence

    def defined(sharder: Any) -> Any:
        return define(config, make_env(config, sharder), vocab)

    sharder = scoring_sharder(program.sharder)
    scorer = Scorer(defined(sharder), sharder, longest, rows)
    whole = padded_rows(program.sharder, rows)
    definition, made = defined(decoding_sharder(program.sharder, whole)), {}

    def generate(prompts: Sequence[list[int]], tokens: int, sampling: dict[str, Any]) -> Iterator[list[int | None]]:
        key = tuple(sorted(sampling.items()))
        if key not in made:
            made[key] = Generator(definition, tokenizer.vocab, **sampling)
        ids = [np.array(prompt, np.int32) for prompt in prompts]
        return made[key].batch(params, ids, tokens, seed=config.seed, eos=tokenizer.eos, rows=whole)

    return HarnessModel(tokenizer, longest, rows, lambda pairs: scorer(params, pairs), generate)


def harness_adapter(reader: HarnessModel) -> Any:
    """A `lm_eval.api.model.TemplateLM` that reads with `reader`."""
    model = importlib.import_module("lm_eval.api.model")
    utils = importlib.import_module("lm_eval.utils")
    tokenizer = reader.tokenizer
    start = tokenizer.eos if tokenizer.bos is None else tokenizer.bos

    class Adapter(model.TemplateLM):
        """Texts are encoded as they stand: after the tokenizer's BOS, where it has one."""

        eot_token_id = tokenizer.eos
        prefix_token_id = start
        max_length = reader.longest

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            ids = tokenizer.encode_batch([string])[0].tolist()
            return ids if tokenizer.bos is None or add_special_tokens is False else [tokenizer.bos, *ids]

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return reader.score([([*context, *text], len(text)) for _, context, text in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            pairs, owner = [], []
            for index, request in enumerate(requests):
                ids = self.tok_encode(request.args[0])
                options = {"prefix_token": start, "max_seq_len": reader.longest, "context_len": 1}
                for window in utils.get_rolling_token_windows(ids, **options):
                    context, text = utils.make_disjoint_window(window)
                    pairs.append(([*context, *text], len(text)))
                    owner.append(index)
            totals = [0.0] * len(requests)
            for index, (score, _) in zip(owner, reader.score(pairs)):
                totals[index] += score
            return totals

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
            found = [""] * len(requests)
            for places in groups.values():
                ids = {place: self.tok_encode(requests[place].args[0]) or [start] for place in places}
                places.sort(key=lambda place: -len(ids[place]))
                for first in range(0, len(places), reader.rows):
                    some = places[first : first + reader.rows]
                    texts = _until(reader, [ids[place] for place in some], requests[some[0]].args[1])
                    found = [dict(zip(some, texts)).get(index, text) for index, text in enumerate(found)]
            return found

    return Adapter()


def _until(reader: HarnessModel, prompts: list[list[int]], options: dict[str, Any]) -> list[str]:
    """Texts up to the first of the words to stop at; all have the same options, which are the harness's."""
    until = options.get("until") or []
    stops = [word for word in ([until] if isinstance(until, str) else until) if word]
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    tokens = int(next((options[name] for name in names if options.get(name) is not None), NEW_TOKENS))
    room = reader.longest - tokens
    if room < 1:
        raise UserError(f"data.sequence: {reader.longest} has no room for {tokens} generated tokens and a prompt")
    does_sample = options.get("do_sample", float(options.get("temperature") or 0) > 0)
    sampling = {
        "temperature": float(options.get("temperature", 1.0)) if does_sample else 0.0,
        "top_k": options.get("top_k") if does_sample else None,
        "top_p": options.get("top_p") if does_sample else None,
    }
    ids: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    for step in reader.generate([prompt[-room:] for prompt in prompts], tokens, sampling):
        for row, token in enumerate(step):
            if token is not None and not any(stop in texts[row] for stop in stops):
                ids[row].append(token)
                texts[row] = reader.tokenizer.decode(ids[row])
        if all(token is None or any(stop in text for stop in stops) for token, text in zip(step, texts)):
            break
    for stop in stops:
        texts = [text.split(stop)[0] for text in texts]
    return texts


def format_lines(results: dict[str, Any]) -> list[str]:
    """A line for each metric of each task."""
    rows = [
        f"{task}  {name.removesuffix(',none')}  {value:.4f}"
        for task, scores in results["results"].items()
        for name, value in scores.items()
        if isinstance(value, float) and "_stderr" not in name
    ]
    return rows or ["no metric"]
