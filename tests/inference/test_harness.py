"""Scores of the lm-evaluation-harness through our decoder, against its own `hf` backend on the exported model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hf_models
import jax
import pytest

import jaxtrain
from jaxtrain.config.run_dir import saved_config
from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.data.tokenizer import EOS, load_tokenizer, train_bpe
from jaxtrain.inference import eval_harness
from jaxtrain.inference.model import load_params

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval (jaxtrain[lm-eval])")
pytest.importorskip("transformers", reason="needs transformers, the peer (jaxtrain[peer])")
pytest.importorskip("accelerate", reason="needs accelerate, which the harness's own backend imports")

LAYOUT = [
    "layout=fsdp_tp",
    "mesh.model=2",
    "simulate=8",
    "precision=fp32",
]
QUESTIONS = ["the cat sat on", "a longer question about the red house and", "why", "dogs and cats run"]
TEXT = "the quick brown fox runs over the lazy dog and then it sleeps on a red mat in the house "
TASKS = {
    "local_choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "local_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "local_generation": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def instances(kind: str, arguments: list[tuple]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=index) for index, one in enumerate(arguments)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`, with the weights of a random model, and `hf`, exported from it, which has its tokenizer."""
    folder = tmp_path_factory.mktemp("harness")
    tokenizer = load_tokenizer(str(train_bpe(iter([TEXT * 3]), 300, folder / "source")))
    name, options = hf_models.CASES["llama2"]
    sizes = {"vocab_size": tokenizer.vocab, "max_position_embeddings": 32, "eos_token_id": tokenizer.eos}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hf_models.CASES, "here", (name, {**options, **sizes, "bos_token_id": None}))
        hf_models.make("here", folder / "source")
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "source" / "tokenizer_config.json").write_text(json.dumps(described))
    jaxtrain.import_model(folder / "source", folder / "run", *LAYOUT)
    jaxtrain.export(folder / "run", folder / "hf")
    return folder


@pytest.fixture(scope="module")
def peer(place: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(place / "hf"), device="cpu", dtype="float32", batch_size=1)


def tasks(folder: Path, said: list[str]) -> None:
    """Task files and their documents; half of the answers are what the model says."""
    lines = [
        {"question": q, "choices": [" the red mat", " a dog", " it sleeps on"], "answer": i % 3,
         "text": f"{TEXT}{q}" * i + q, "said": text if i % 2 else "something else"}
        for i, (q, text) in enumerate(zip(QUESTIONS, said))
    ]  # fmt: skip
    (folder / "documents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}}}
    for name, task in TASKS.items():
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))


def test_scores_are_those_of_the_hf_backend(place: Path, peer: Any, tmp_path: Path):
    options = TASKS["local_generation"]["generation_kwargs"]
    said = peer.generate_until(instances("generate_until", [(q, dict(options)) for q in QUESTIONS]))
    tasks(tmp_path, said)
    got = eval_harness.evaluate_tasks(place / "run", None, [], list(TASKS), include_path=str(tmp_path), rows=3)
    manager = lm_eval.tasks.TaskManager(include_path=str(tmp_path))
    want = lm_eval.evaluator.simple_evaluate(
        peer, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, log_samples=False
    )
    assert got["results"].keys() == want["results"].keys() == TASKS.keys()
    for task, scores in want["results"].items():
        numbers = {key: value for key, value in scores.items() if isinstance(value, float)}
        assert numbers
        assert {key: got["results"][task][key] for key in numbers} == pytest.approx(numbers, rel=1e-4), task
    assert got["results"]["local_generation"]["exact_match,none"] == 0.5
    assert len(eval_harness.format_lines(got)) == 6


def test_every_log_likelihood_is_that_of_the_hf_backend(place: Path, peer: Any):
    config, _ = resolve(saved_config(place / "run"), paths=False)
    tokenizer = load_tokenizer(config.data.tokenizer)
    program = build_program(config, config.model.vocab or tokenizer.vocab, jax.devices()[:8])
    params = load_params(place / "run", None, program)[0]
    ours = eval_harness.harness_adapter(eval_harness.open_harness_model(program, tokenizer, params, 3))
    pairs = [(q, " the red mat") for q in QUESTIONS] + [("", "a dog"), (TEXT * 4, " runs"), ("it ", "sleeps")]
    got, want = (lm.loglikelihood(instances("loglikelihood", pairs)) for lm in (ours, peer))
    assert [score for score, _ in got] == pytest.approx([score for score, _ in want], abs=1e-4)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    texts = [(TEXT * 3,), ("why",)]  # longer than the model reads at once, and shorter
    got, want = (lm.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for lm in (ours, peer))
    assert got == pytest.approx(want, abs=1e-4)


def test_a_task_that_is_not_there_is_said_in_one_line(place: Path):
    with pytest.raises(ValueError, match=r"--tasks: no task nowhere in the harness; --include-path DIR"):
        eval_harness.evaluate_tasks(place / "run", None, [], ["nowhere"])
