"""Several validation sets in a whole run, against NumPy."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import pytest
from rich.console import Console

import jaxtrain
from jaxtrain.core.evaluation import validate
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from jaxtrain.inference.model import evaluate
from jaxtrain.trackers.console import ConsoleTracker

METRICS = {"loss", "cross_entropy", "perplexity", "bits_per_byte"}
TEXTS = {  # shorter than a row, so that each is read as one piece
    "web": ["Größe und Maß, äöü", "a second document of another length", "xyz"],
    "code": ["def f(x):\n    return x + 1\n", "for i in range(3): print(i)"],
}


@pytest.fixture
def base(tmp_path: Path) -> dict[str, Any]:
    for name, texts in {"train": [f"document {i} has these words " * 3 for i in range(20)], **TEXTS}.items():
        (tmp_path / name).mkdir()
        for index, text in enumerate(texts):
            (tmp_path / name / f"{index}.txt").write_text(text)
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS["code"]))
    sets = {
        "web": {"path": str(tmp_path / "web")},
        "code": {"path": str(tmp_path / "code.jsonl"), "format": "jsonl", "field": "body"},
    }
    return {
        "dir": str(tmp_path / "runs"), "steps": 4, "precision": "fp32", "simulate": 8, 
        "model": {"embed": 16, "layers": 2, "heads": 2, "mlp": 32, "init_std": 0.3},
        "data": {"sources": [{"path": str(tmp_path / "train")}], "sequence": 64, "global_batch": 8,
                 "validation_fraction": 0.3, "cache_dir": str(tmp_path / "cache"), "workers": 1},
        "checkpoint": {"every": 2, "keep": 1, "keep_best": 1, "best_metric": "eval/code/bits_per_byte"},
        "eval": {"every": 2, "batches": 50, "sets": sets}, "log": {"tensorboard": False}, "layout": "fsdp",
    }  # fmt: skip


def trained(base: dict[str, Any], *overrides: str) -> Any:
    screen = ConsoleTracker(4, console=Console(file=io.StringIO()), live=False)
    return jaxtrain.train(jaxtrain.load(None, *overrides, base=base), console=screen)


def nats(result: Any, tokenizer: Tokenizer, text: str) -> float:
    """Of a document's targets: all its tokens but the first, and eos."""
    params, model = jax.device_get(result.state["params"]), result.program.config.model
    ids = np.array([*tokenizer.encode_batch([text])[0], tokenizer.eos])
    tokens = ids[None, :-1]
    logits = numpy_decoder.logits(params, model, tokens, np.arange(tokens.size)[None], np.ones_like(tokens))[0]
    logits -= logits.max(-1, keepdims=True)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(-logs[np.arange(tokens.size), ids[1:]].sum())


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_each_set_is_measured_whole(tmp_path: Path, base: dict[str, Any], kind: str):
    if kind == "bpe":
        pytest.importorskip("tokenizers", reason="needs tokenizers (jaxtrain[data])")
        base["data"]["tokenizer"] = str(train_bpe(iter(["words in a document " * 9]), 270, tmp_path / "tok"))
    result = trained(base)
    tokenizer = load_tokenizer(base["data"].get("tokenizer", "bytes"))
    for name, texts in TEXTS.items():
        found = {key: result.metrics[f"eval/{name}/{key}"] for key in METRICS}
        total, targets = (
            sum(nats(result, tokenizer, text) for text in texts),
            sum(map(len, tokenizer.encode_batch(texts))),
        )
        assert found["loss"] == found["cross_entropy"] == pytest.approx(total / targets, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(total / targets), rel=1e-4)
        size = sum(len(text.encode()) for text in texts)
        assert found["bits_per_byte"] == pytest.approx(total / size / math.log(2), rel=1e-5)
    if kind == "bpe":
        return

    records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {f"eval/{part}{key}" for part in ("", "web/", "code/") for key in METRICS}
    assert [{key for key in record if key.startswith("eval/")} for record in records] == [set(), names, set(), names]
    assert records[3]["eval/bits_per_byte"] == pytest.approx(records[3]["eval/loss"] / math.log(2))  # a byte a target
    again = evaluate(result.run_dir, 4, None, [])
    assert again == pytest.approx({"step": 4, **{name: records[3][name] for name in names}}, rel=1e-6)


def test_a_set_can_stand_alone_and_rank_checkpoints(base: dict[str, Any]):
    base["optimizer"], base["schedule"] = {"lr": 0.5}, {"name": "constant"}  # worse from step to step
    result = trained(base, "data.validation_fraction=0", "eval.every=1", "checkpoint.every=1")
    records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = {record["step"]: record["eval/code/bits_per_byte"] for record in records}
    assert "eval/loss" not in result.metrics
    best = min(scores, key=lambda step: scores[step])
    assert best != 4
    kept = {int(path.name) for path in (result.run_dir / "checkpoints").iterdir() if path.name.isdecimal()}
    assert kept == {best, 4}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("eval.sets.2x.path=stdlib", "eval.sets.2x: not a name of a validation set"),
        ("eval.sets.web.pth=x", "eval.sets.web.pth: unknown key (did you mean `path`?)"),
        ("eval.sets.web.path=/nope/x", 'eval.sets.web.path: no such file or folder: "/nope/x"'),
        ("eval.sets.web.format=cvs", "expected auto, text, jsonl, parquet"),
        ("checkpoint.best_metric=eval/cod/loss", "did you mean `eval/code/loss`"),
        ("checkpoint.best_metric=eval/other/loss", "validation has no metric"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_before_jax_starts(base: dict[str, Any], change: str, expected: str):
    with pytest.raises(jaxtrain.ConfigError) as error:
        jaxtrain.load(None, change, base=base)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_at_most_two_batches_are_in_flight(monkeypatch: pytest.MonkeyPatch):
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 2000, lambda _, y: jnp.sin(y @ y), x).mean())
    x, found = jnp.ones((128, 128)), []

    def evaluated(*_: Any) -> Any:
        assert all(value.is_ready() for value in found[:-1])
        found.append(slow(x))
        return {"cross_entropy": (found[-1], jnp.ones(()))}, {}

    slow(x)  # compiles
    monkeypatch.setattr("jaxtrain.core.evaluation.placer", lambda *_: lambda index: index)
    program: Any = SimpleNamespace(
        evaluate=evaluated, eval_metrics=lambda *_: {}, metrics=lambda _: {}, config=SimpleNamespace(model=None)
    )
    assert validate(program, {"eval/": SimpleNamespace(batches=6)}, {}, 6)["eval/loss"] == pytest.approx(found[0])
    assert len(found) == 6
