"""Error messages: each problem in one line, with its location and what would be right; all at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.config import ConfigError, Problem, add_locations
from jaxtrain.config.load import load, resolve
from jaxtrain.core.layout_check import check_config


def lines(text: str, path: Path, *overrides: str, **kwargs) -> list[str]:
    file = path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        resolve(file, *overrides, **kwargs)
    assert len(str(error.value).split("\n")) == len(error.value.problems)
    return [line.replace(f"{file}", "c.yaml") for line in str(error.value).split("\n")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps: many", 'steps: expected a whole number; found "many"'),
        ("steps: 0", "steps: expected at least 1; found 0"),
        ("steps: 1.5", "steps: expected a whole number; found 1.5"),
        ("steps: true", "steps: expected a whole number; found true"),
        ("steps: 9999999999", "steps: expected at most 2147483647; found 9999999999"),
        (f"steps: {'9' * 5000}", "steps: the number has more than 40 digits"),
        ("optimizer: {lr: .nan}", "optimizer.lr: expected a finite number; found nan"),
        ("optimizer: {ema_decay: 1.5}", "optimizer.ema_decay: expected at most 1.0; found 1.5"),
        ("optimizer: {betas: [1, 0.9]}", "optimizer.betas.0: expected less than 1.0; found 1"),
        ("model: {qk_norm: yes}", 'model.qk_norm: expected none, per_head or full; found "yes"'),
        (
            "name: 5",
            "name: expected text (in quotes if it looks like a number); found 5",
        ),
        (
            "name: ../x",
            "name: expected a name of letters, digits, `_`, `.` and `-`, that starts with a letter or digit;"
            ' found "../x"',
        ),
        ("dir: 5", "dir: expected text (in quotes if it looks like a number); found 5"),
        ("eval:", "eval: expected a section with keys such as every, batches and sets; found nothing (null)"),
        ("data: {sources: 5}", "data.sources: expected a list; found 5"),
        (
            "data: {sources: [{weight: {x: 1}}]}",
            "data.sources.0.weight: expected whole numbers as keys; found a section of keys",
        ),
        (
            "optimizer: {name: adam}",
            "optimizer.name: expected adamw, adafactor, lion, sgd or muon, `optax.NAME`, or a function as "
            '`package.module:name`; found "adam" (did you mean `adamw`?)',
        ),
        (
            "step: {remat: ful}",
            'step.remat: expected none, full or dots; found "ful" (did you mean `full`?)',
        ),
        ("rules: {batch: 5}", "rules.batch: expected a mesh axis, a list of mesh axes, or null; found 5"),
        ("mesh: {data: 0}", "mesh.data: expected a positive integer, or -1 to infer the size; found 0"),
        ("mesh: {data: -2}", "mesh.data: expected a positive integer, or -1 to infer the size; found -2"),
        ("mesh: {data: x}", 'mesh.data: expected a positive integer, or -1 to infer the size; found "x"'),
        ("zero: true", "zero: expected 0, 1, 2 or 3; found true"),
        ("zero: 1.0", "zero: expected 0, 1, 2 or 3; found 1.0"),
        (
            "data: {sources: [{weight: x}]}",
            'data.sources.0.weight: expected a number, or numbers by step as in {0: 1.0, 1000: 0.5}; found "x"',
        ),
        ("optimizer: {betas: [0.9]}", "optimizer.betas: expected one more value; found a list of 1"),
        ("optimizer: {betas: [0.9, 0.9, 0.9]}", "optimizer.betas: expected at most 2 values; found a list of 3"),
        ("optimizer: {betas: 1}", "optimizer.betas: expected a list; found 1"),
        ("optimizer: lion", 'optimizer: expected a section with keys such as name, options and lr; found "lion"'),
        ("lr: 1", "lr: unknown key here; expected optimizer.lr"),
        (
            "data: {every: 1}",
            "data.every: unknown key here; expected checkpoint.every, eval.every, log.every or sync.every",
        ),
        ("optimizr: {}", "optimizr: unknown key (did you mean `optimizer`?)"),
        ("model: {embd: 3}", "model.embd: unknown key (did you mean `embed`?)"),
        (
            "learnrate_lr: 1",
            "learnrate_lr: unknown key; `jaxtrain schema` prints all",
        ),
        ("optimizer.lr: 1", "optimizer.lr: unknown key; write it nested, as optimizer: {lr: ...}"),
        ("model: {embed: 8, heads: 1, embed: 10}", "model.embed: given twice; first in line 1"),
        ("model: {true: 1}", "model: a key is a word, not true; put it in quotes if it is meant as text"),
        ("model: {[a]: 1}", "model: a key is a word, not a section or a list"),
        ("name: a\n b: c", "is not valid YAML: mapping values are not allowed here"),
        (
            "layout: fsdp_pt",
            'layout: no layout "fsdp_pt"; expected 3d, cp_gather, cp_ring, cp_ulysses, ddp, ep, ep_tp, fsdp, fsdp_tp,'
            " hsdp, pp, pp_fsdp, tp, tp_sp, zero1, zero2 or zero3 (did you mean `fsdp_tp` or `fsdp`?)",
        ),
    ],
)
def test_messages(tmp_path: Path, text: str, expected: str) -> None:
    line = 2 if "\n" in text else 1
    assert lines(text, tmp_path) == [f"c.yaml:{line}: {expected}"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "model: {heads: 6, embed: 96, kv_heads: 4}",
            "model.kv_heads: 6 query heads cannot be shared by 4 key/value heads; expected a divisor, e.g. 2, 3 or 6",
        ),
        (
            "model: {embed: 100, heads: 3}",
            "model.heads: embed 100 does not split into 3 heads; expected e.g. 1, 2 or 4, or set model.head_dim",
        ),
        (
            "model: {head_dim: 7}",
            "model.head_dim: rotary embeddings need an even head size, not 7; expected e.g. 6 or 8",
        ),
        (
            "model: {embed: 20, heads: 4}",
            "model.heads: rotary embeddings need an even head size, not 5; expected e.g. 4 or 6",
        ),
        ("model: {embed_multiplier: 0}", "model.embed_multiplier: expected more than 0; found 0"),
        (
            "model: {sliding_window_rope_theta: 2.0}",
            "model.sliding_window_rope_theta: applies to layers with a sliding window; set model.sliding_window too",
        ),
        (
            "model: {sliding_window_pattern: 2}",
            "model.sliding_window_pattern: applies to layers with a sliding window; set model.sliding_window too",
        ),
        (
            "model: {learned_positions: 512}",
            "data.sequence: expected at most 512 tokens for 512 positions (model.learned_positions); found 1024",
        ),
        (
            "model: {learned_positions: 8192}\nlog: {sample_tokens: 9000}",
            "log.sample_tokens: expected at most 8190 tokens for 8192 positions (model.learned_positions); found 9000",
        ),
        (
            "model: {rope_scaling: {type: llama3, low_freq_factor: 4}}",
            "model.rope_scaling.low_freq_factor: expected less than model.rope_scaling.high_freq_factor 4; found 4",
        ),
        (
            "model: {learned_positions: 2048, rope_scaling: {factor: 2}}",
            "model.rope_scaling: learned positions are not rotary; expected null",
        ),
        (
            "model: {moe: {num_experts: 4, top_k: 5}}",
            "model.moe.top_k: a token cannot choose 5 of 4 experts; expected at most 4",
        ),
        (
            "model: {moe: {top_k: 1, normalize_gates: true}}",
            "model.moe.normalize_gates: gates of a single choice are always 1, so the router gets no"
            " gradient; expected false, or top_k > 1",
        ),
        (
            "model: {moe: {num_experts: 4, capacity_factor: 2.5}}",
            "model.moe.capacity_factor: capacity 2.5 x 2 / 4 gives an expert more slots than tokens;"
            " expected at most 2, or null to drop none",
        ),
        (
            "model: {moe: {num_experts: 2, bias_update_rate: 0.001}}",
            "model.moe.bias_update_rate: every token goes to all 2 experts; expected null, or a lower top_k",
        ),
        ("model: {moe: {}, biases: [qkv, mlp]}", "model.biases: experts have no biases; expected it without mlp"),
        (
            "step: {microbatches: 3}",
            "step.microbatches: 3 microbatches do not divide data.global_batch 8; expected e.g. 1, 2 or 4",
        ),
        (
            "steps: 10\nschedule: {warmup_steps: 9, name: wsd}",
            "schedule.decay_fraction: a decay over 0.2 of 10 steps does not fit after 9 of warm-up",
        ),
        (
            "model: {type: decodr}",
            "model.type: expected `decoder` or a class as `package.module:Class`;"
            ' found "decodr" (did you mean `decoder`?)',
        ),
        ("data: {type: 'a b:C'}", 'data.type: expected `text` or a class as `package.module:Class`; found "a b:C"'),
        (
            "model: {options: {a: 1}}",
            "model.options: options are for a user's own class; `decoder` takes its keys directly",
        ),
        ("data: {tokenizer: byte}", 'data.tokenizer: no such file: "byte" (did you mean `bytes`?)'),
        (
            "data: {tokenizer: /nope/t.json}",
            'data.tokenizer: no such file: "/nope/t.json"; expected `bytes` or the path of a tokenizer.json',
        ),
        ("data: {sources: [{path: /nope/x}]}", 'data.sources.0.path: no such file or folder: "/nope/x"'),
        ("data: {sources: [{path: /nope/*.py}]}", 'data.sources.0.path: no such file or folder: "/nope"'),
        ("data: {sources: []}", "data.sources: is empty; expected at least one source, e.g. [stdlib]"),
        (
            "data: {sources: [{weight: {5: 0}}]}",
            "data.sources: expected a weight above 0 from step 5 on; every source has weight 0",
        ),
    ],
)
def test_conflicts_between_keys(tmp_path: Path, text: str, expected: str) -> None:
    messages = lines(text, tmp_path)
    assert len(messages) == 1
    assert messages[0].split(": ", 1)[1] == expected


def test_valid_combinations_pass(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "t.json").write_text("{}")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"data: {{tokenizer: {tmp_path}/t.json, sources: [{{path: {tmp_path}/corpus}}, {{path:"
        f" '{tmp_path}/*/**.py'}}]}}\n"
        "model: {sliding_window: 64, sliding_window_pattern: 2, heads: 6, embed: 96, kv_heads: 3}\n"
    )
    assert resolve(file)[0].model.kv_heads == 3
    assert resolve(file, "model.embed=100", "model.head_dim=16")[0].model.embed == 100
    file.write_text("data: {tokenizer: gone.json, sources: [{path: /nope}]}\n")
    assert resolve(file, paths=False)[0].data.tokenizer == "gone.json"


def test_all_problems_at_once_and_no_false_ones(tmp_path: Path) -> None:
    text = """\
lr: 1
model:
  headz: 3
  heads: none
  embed: 100
schedule: {warmup_steps: 9, name: wsd}
steps: 10
step: {microbatches: 3}
layout: 3d
"""
    messages = lines(text, tmp_path, "data.sources.4.weight=1", "seed", "mesh.data=[", checks=[check_config])
    assert messages == [
        "c.yaml:1: lr: unknown key here; expected optimizer.lr",
        "c.yaml:3: model.headz: unknown key (did you mean `heads` or `kv_heads`?)",
        'c.yaml:4: model.heads: expected a whole number; found "none"',
        "c.yaml:6: schedule.decay_fraction: a decay over 0.2 of 10 steps does not fit after 9 of warm-up",
        "c.yaml:8: step.microbatches: 3 microbatches do not divide data.global_batch 8; expected e.g. 1, 2 or 4",
        'command line: expected key=value; found "seed" (did you mean `seed`?)',
        "command line: mesh.data: is not valid YAML: while parsing a flow node expected the node content, but found"
        " '<stream end>'",
        "command line: data.sources.4.weight: `4` is no item of this list; its items are 0 to 0",
    ]


def test_a_width_sharded_as_the_vocabulary_is_valid_on_any_number_of_devices() -> None:
    """36 is no multiple of the 8 known shards, nor of the 32 that -1 may give."""
    keys = ("model.embed=36", "model.heads=4", "model.kv_heads=4", "model.head_dim=16", "model.vocab=256")
    layout = ("mesh={data: 1, fsdp: -1, model: 4}", "rules={batch: fsdp, embed: fsdp, vocab: model, mlp: model}")
    config = load(None, *keys, *layout, "data.global_batch=8")
    assert check_config(config) == check_config(config, 16) == []
    short = load(None, *keys, "mesh={data: 1, fsdp: -1, model: 8}", layout[1], "data.global_batch=8")
    assert check_config(short) == check_config(short, 32) == []


def test_problems_of_the_layout_have_locations(tmp_path: Path) -> None:
    text = "layout: tp\nsimulate: 8\nmodel: {heads: 12, head_dim: 8, kv_heads: 4}\nrules:\n  mlpp: model\nsteps: 0\n"
    messages = lines(text, tmp_path, checks=[check_config])
    assert [line.split(": ")[:2] for line in messages] == [
        ["c.yaml:5", "rules.mlpp"],
        ["c.yaml:6", "steps"],
        ["layout tp", "rules.heads"],
    ]
    alone = text.replace("rules:", "rules:\n  heads: null").replace("kv_heads: 4", "kv_heads: 3")
    assert "layout tp: rules.kv_heads: 3" in "\n".join(lines(alone, tmp_path, checks=[check_config]))
    assert (
        add_locations([Problem("", "mesh", "x")], {"mesh.data": "default", "mesh.model": "c.yaml:3"})[0].where
        == "c.yaml:3"
    )


def test_a_missing_layout_is_the_only_problem(tmp_path: Path) -> None:
    """The mesh without its layout is not checked."""
    (message,) = lines("layout: fsdpp\nsimulate: 8\n", tmp_path, checks=[check_config])
    assert message.startswith('c.yaml:1: layout: no layout "fsdpp"')


def test_errors_in_a_layout_have_its_lines(tmp_path: Path) -> None:
    (tmp_path / "layouts").mkdir()
    (tmp_path / "layouts" / "own.yaml").write_text("mesh:\n  modl: 2\nrule: {}\n")
    messages = lines("layout: own\n", tmp_path)
    assert [line.rpartition("/")[2] for line in messages] == [
        "own.yaml:2: mesh.modl: unknown key (did you mean `model`?)",
        "own.yaml:3: rule: a layout has mesh, rules, context_parallel, zero and pipeline only (did you mean `rules`?)",
    ]


def test_long_lists_of_problems_are_cut(tmp_path: Path) -> None:
    text = "".join(f"k{i}: 1\n" for i in range(80))
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        resolve(tmp_path / "c.yaml")
    assert str(error.value).endswith("... and 30 more")
    assert len(error.value.problems) == 80


def test_a_problem_is_one_printable_line() -> None:
    problem = Problem("a\nb", "k\x1b[0m", "m\u2028\udcff")
    assert str(problem) == "a\\nb: k\\x1b[0m: m\\u2028\\udcff"
