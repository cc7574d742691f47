"""Fragments that travel while replicas train on: what is exchanged when, identities, resume, and bytes."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from test_run import config, cut, train
from tiny import losses, records
from tiny_net import LAYOUTS, replicas, run

from jaxtrain.core.batch_spec import batch_spec
from jaxtrain.errors import UserError
from jaxtrain.hlo import device_groups, parse
from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.planning.hardware import targets
from jaxtrain.sync import quantized_mean
from jaxtrain.sync.fragments import Fragments
from jaxtrain.sync.streaming import Event, Send

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def streaming(fragments: int, tau: int, alpha: float, every: int = 8, **changes: Any) -> dict[str, Any]:
    options = {"fragments": fragments, "tau": tau, "alpha": alpha}
    return {"strategy": "streaming_diloco", "every": every, "streaming": options, **changes}


def assert_equal_bits(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def arrays(shapes: dict[str, tuple[int, ...]]) -> tuple[Any, Any]:
    """Parameters of these shapes with different numbers, and names: those called `stack...` are stacks."""
    start, params = 0, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        params[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape) + 1
        start += size
    names = {n: ("layers" if n.startswith("stack") else None, *[None] * (len(s) - 1)) for n, s in shapes.items()}
    return params, names


SHAPES = {
    "stack": (7, 48, 40), "stack_bias": (7, 40), "stack_short": (2, 64, 33), "table": (301, 64), "head": (64, 90),
    "norm": (64,), "scale": (),
}  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_fragments_part_the_parameters_and_chunks_the_fragments(count: int, chunks: int) -> None:
    params, names = arrays(SHAPES)
    parts, seen = Fragments(params, names, count, chunks), Counter()
    rebuilt = jax.tree.map(np.zeros_like, params)
    for fragment in range(count):
        taken = parts.take(params, fragment)
        through = parts.unpack(parts.pack(taken, fragment), fragment)
        for path in parts.cut_paths(fragment):
            one = parts.parameters[path]
            layout = one.cut_part(taken[path])
            assert layout.shape == one.layout
            assert layout.shape[one.axis] == chunks
            through[path] = one.join(layout)
        for path, part in taken.items():
            np.testing.assert_array_equal(through[path], part)
            seen.update(np.asarray(part).ravel().tolist())
        rebuilt = parts.put(rebuilt, fragment, through)
        layers = set(np.asarray(taken["stack"]).reshape(-1, 48 * 40)[:, 0].tolist()) - {0.0}
        assert layers == set(params["stack"][fragment::count, 0, 0].tolist())
    assert_equal_bits(rebuilt, params)
    total = sum(int(np.prod(s)) for s in SHAPES.values())
    seen.pop(0.0, None)  # fills up a stack whose layers do not divide
    assert len(seen) == total
    assert set(seen.values()) == {1}


def test_fragments_have_about_equal_bytes_and_are_not_more_than_what_can_be_parted() -> None:
    shapes = {name: (10 + 7 * n, 100) for n, name in enumerate("abcdefghij")}
    params, names = arrays(shapes)
    sizes = [sum(x.size for x in Fragments(params, names, 3, 1).take(params, f).values()) for f in range(3)]
    assert max(sizes) - min(sizes) <= 100 * 20
    with pytest.raises(
        UserError, match="11 fragments of a model with 10 parameters, and no stack of layers; expected at"
    ):
        Fragments(params, names, 11, 1)
    with pytest.raises(
        UserError, match="8 fragments of a model with 7 layers in a stack; expected at most 7, a divisor"
    ):
        Fragments(*arrays(SHAPES), 8, 1)


@pytest.mark.parametrize(("fragments", "tau"), [(1, 0), (2, 0), (2, 3), (4, 1)])
def test_each_fragment_is_exchanged_once_in_every_steps_and_alone(fragments: int, tau: int) -> None:
    program = tiny_net.program({"replica": 2}, rules={"batch": []}, sync=streaming(min(fragments, 2), tau, 0.5, 16))
    strategy = program.synchronizer.strategy
    count, flying, captured, applied = min(fragments, 2), None, Counter(), Counter()
    for step in range(32):
        plan = strategy.plan(step)
        if plan.send is not None:
            assert flying is not None
            assert set(plan.send.paths) <= set(strategy.fragments.paths(flying[0]))
            flying[1] += 1
        if isinstance(plan.exchange, Event):
            fragment, captures, applies = plan.exchange
            if captures:
                assert flying is None
                flying, captured[fragment] = [fragment, 0], captured[fragment] + 1
            if applies:
                assert flying == [fragment, tau]
                flying, applied[fragment] = None, applied[fragment] + 1
    assert flying is None  # nothing is left over at the end
    assert captured == applied == dict.fromkeys(range(count), 2)


@layouts
@pytest.mark.parametrize("compress", [{}, {"deltas": "int4"}], ids=["float32", "int4"])
def test_one_fragment_at_once_without_mixing_is_diloco(layout: str, compress: Any, monkeypatch: Any) -> None:
    """Bit for bit, with uneven weights, momentum, noise and an optimizer with moments."""
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    changes = {"optimizer": {"name": "adamw", "lr": 0.02}, "model": {"options": {"noise": 0.1}}}
    ours, theirs = (
        run(replicas(2, layout, sync=sync | {"compress": compress}, **changes), 8, weights="uneven")[1]
        for sync in (streaming(1, 0, 0.0, 4), {"strategy": "diloco", "every": 4})
    )
    for a, b in zip(ours, theirs, strict=True):
        assert_equal_bits((a["params"], a["agreed"], a["metrics"]), (b["params"], b["agreed"], b["metrics"]))


@layouts
@pytest.mark.parametrize("tau", [0, 2])
def test_replicas_that_keep_their_own_values_train_as_without_exchanges(layout: str, tau: int) -> None:
    """alpha 1: parameters and moments of each replica, bit for bit; the outer parameters move beside them."""
    ours = run(replicas(2, layout, sync=streaming(2, tau, 1.0)), 10)[1]
    alone = run(replicas(2, layout, sync={"strategy": "local_sgd", "every": 100}), 10)[1]
    for a, b in zip(ours, alone, strict=True):
        assert_equal_bits((a["params"], a["metrics"]["loss"]), (b["params"], b["metrics"]["loss"]))
    assert np.abs(ours[-1]["agreed"]["a"] - ours[0]["agreed"]["a"]).max() > 1e-3


def gradients(p: dict[str, np.ndarray], batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those of `tiny_net.Net` in float64."""
    x, y, w = (np.float64(batch[name]) for name in "xyw")
    hidden = np.tanh(x @ p["a"])
    error = 2 * w[:, None] * (hidden @ p["b"] - y) / w.sum()
    return {"a": x.T @ (error @ p["b"].T * (1 - hidden**2)), "b": hidden.T @ error}


def by_hand(start: dict[str, np.ndarray], steps: int, every: int, tau: int, alpha: float) -> tuple[list, list]:
    """Local and outer parameters after every step: fragment 0 is `a`, fragment 1 `b`, in NumPy with float64."""
    lr, outer_lr, momentum, interval = 0.05, 0.7, 0.9, every // 2
    local = [{n: np.float64(x) for n, x in start.items()} for _ in range(2)]
    outer, velocity = {n: np.float64(x) for n, x in start.items()}, {"a": 0.0, "b": 0.0}
    weights, mean, found = {"a": np.zeros(2), "b": np.zeros(2)}, {}, ([], [])
    for step in range(steps):
        batch = tiny_net.rows(step, weights="uneven")
        for number, half in enumerate(({k: v[:8] for k, v in batch.items()}, {k: v[8:] for k, v in batch.items()})):
            grads = gradients(local[number], half)
            local[number] = {n: x - lr * grads[n] for n, x in local[number].items()}
            for name in weights:
                weights[name][number] += half["w"].sum()
        done = step + 1
        if (done + tau) % interval == 0:
            name = "ab"[((done + tau) // interval - 1) % 2]
            share = weights[name] / weights[name].sum()
            mean[name], weights[name] = sum(w * each[name] for w, each in zip(share, local)), np.zeros(2)
        if done % interval == 0:
            name = "ab"[(done // interval - 1) % 2]
            delta = outer[name] - mean[name]
            velocity[name] = momentum * velocity[name] + delta
            outer[name] = outer[name] - outer_lr * (delta + momentum * velocity[name])
            for each in local:
                each[name] = alpha * each[name] + (1 - alpha) * outer[name]
        found[0].append([dict(each) for each in local])
        found[1].append(dict(outer))
    return found


@pytest.mark.sampled(5)
@layouts
@pytest.mark.parametrize(("tau", "alpha"), [(2, 0.5), (0, 0.25), (1, 0.0)])
@pytest.mark.parametrize("smallest", [1, 1024], ids=["cut", "packed"])
def test_two_fragments_move_as_numpy_says(layout: str, tau: int, alpha: float, smallest: int, monkeypatch: Any) -> None:
    """With uneven weights, which count since the last capture of a fragment."""
    monkeypatch.setattr(quantized_mean, "SMALLEST", smallest)
    sync = streaming(2, tau, alpha, 8)
    program = replicas(2, layout, sync=sync)
    state = program.init()
    start = {name: np.asarray(x[0]) for name, x in state["params"].items()}
    assert bool(program.synchronizer.strategy.fragments.cut_paths(0)) == (smallest == 1 or tau <= 1)
    history = run(program, 17, state, weights="uneven")[1]
    local, outer = by_hand(start, 17, 8, tau, alpha)
    for found, mine, agreed in zip(history, local, outer, strict=True):
        for name in "ab":
            np.testing.assert_allclose(found["params"][name], np.stack([each[name] for each in mine]), atol=2e-5)
            np.testing.assert_allclose(found["agreed"][name], agreed[name], atol=2e-5)


FLYING = {"log": {"tensorboard": False, "every": 1}, "checkpoint": {"every": 1, "keep": 20}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("compress", [{}, {"deltas": "int4"}], ids=["float32", "int4"])
def test_a_run_resumed_with_a_fragment_in_flight_is_the_same_bit_for_bit(
    tmp_path: Path, compress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks travel in steps 3, 4, 7 and 8: after a capture, after one of two chunks, and after an exchange."""
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    sync = streaming(2, 2, 0.5, 8, compress=compress)
    whole, _ = train(config(tmp_path, "whole", sync, **FLYING))
    assert [r.get("exchanged_bytes", 0) > 0 for r in records(whole.run_dir)][2:4] == [True, True]
    expected = losses(whole.run_dir)
    for step in (7, 3, 2):
        part = config(tmp_path, f"part-{step}", sync, **FLYING)
        shutil.copytree(whole.run_dir, part.run_dir)
        cut(part.run_dir, step)
        resumed, text = train(part, resume=True)
        assert "losses are bitwise those of an uninterrupted run" in text
        assert losses(resumed.run_dir) == expected
        assert_equal_bits(resumed.state, whole.state)
    if compress:
        own = whole.state["sync"]["own"]
        assert min(float(np.abs(own[name][path]).max()) for name in ("worker", "server") for path in "ab") > 0


def test_another_timing_ends_the_round_early(tmp_path: Path) -> None:
    """With other turns what is in flight would mean something else, though shapes are the same."""
    sync = streaming(2, 2, 0.5, 8)
    first, _ = train(config(tmp_path, "run", sync, **FLYING))
    cut(first.run_dir, 3)
    later = streaming(2, 2, 0.5, 16)
    resumed, text = train(config(tmp_path, "run", later, steps=16, **FLYING), resume=True)
    assert "guarantee the config asks for different steps from here on" in text
    assert np.isfinite(resumed.metrics["loss"])
    own = resumed.state["sync"]["own"]
    assert float(np.abs(own["weights"]).max()) == 0  # applied in the last step


@layouts
@pytest.mark.parametrize("tau", [0, 2])
def test_a_replica_that_is_not_finite_is_left_out_of_a_capture_and_continues_from_the_outer(
    layout: str, tau: int
) -> None:
    program = replicas(2, layout, sync=streaming(2, tau, 0.5, 8))
    due = 4 - tau
    state, _ = run(program, due - 1)
    broken = state["params"]["b"].at[1].set(jnp.nan)
    state["params"] = {**state["params"], "b": jax.device_put(broken, state["params"]["b"].sharding)}
    state, history = run(program, 1, state, first=due - 1)
    assert history[0]["metrics"]["left_out"].tolist() == [0, 1]
    outer = jax.device_get(state["sync"]["own"]["outer"])
    for name in "ab":  # of both fragments: `b` is not due
        np.testing.assert_array_equal(np.asarray(state["params"][name])[1], outer[name])
    state, history = run(program, 8, state, first=due)
    assert all(
        np.isfinite(leaf).all() for leaf in jax.tree.leaves((history[-1]["params"], jax.device_get(state["sync"])))
    )
    assert not any(each["metrics"].get("left_out", np.zeros(2)).any() for each in history)


def test_a_capture_without_any_finite_replica_changes_nothing() -> None:
    program = replicas(2, "fsdp", sync=streaming(2, 1, 0.5, 8))
    state, _ = run(program, 2)
    before = jax.device_get(state["sync"]["own"]["outer"])
    state["params"] = jax.tree.map(lambda x: jax.device_put(x * np.nan, x.sharding), state["params"])
    state, history = run(program, 2, state, first=2)
    assert history[0]["metrics"]["left_out"].tolist() == [1, 1]
    assert_equal_bits(state["sync"]["own"]["outer"], before)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(history[-1]["params"]))


@layouts
def test_few_bits_with_residuals_train_like_float32(layout: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    exact, packed, lossy = (
        run(replicas(2, layout, sync=streaming(2, 2, 0.5, 8, compress=compress)), 24)[1]
        for compress in ({}, {"deltas": "int4"}, {"deltas": "int4", "error_feedback": False})
    )
    final = [float(history[-1]["metrics"]["loss"]) for history in (exact, packed, lossy)]
    assert final[1] == pytest.approx(final[0], rel=0.05)
    off = [np.abs(h[-1]["agreed"]["a"] - exact[-1]["agreed"]["a"]).max() for h in (packed, lossy)]
    assert 0 < off[0] < 0.2
    sent = [[h["metrics"].get("exchanged_bytes", 0.0) for h in history[:8]] for history in (exact, packed)]
    assert [size > 0 for size in sent[0]] == [False, False, True, True] * 2
    assert sum(sent[1]) < sum(sent[0]) / 2  # blocks of so few values are filled up


def sent_between_replicas(program: Any, lowered: Any) -> int:
    """Bytes that a device sends to those of other replicas."""
    found = count_collectives(lowered.compile().as_text(), dict(program.sharder.mesh.shape))
    return sum(row.bytes for row in found if "replica" in row.axes)


@layouts
@pytest.mark.parametrize("deltas", ["none", "int4"])
def test_a_step_sends_the_bytes_of_a_chunk_beside_its_metrics(layout: str, deltas: str, monkeypatch: Any) -> None:
    """On two devices of a replica; programs of captures and of what has arrived send next to nothing."""
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    sync = streaming(2, 2, 0.5, 8, compress={"deltas": deltas})
    program = replicas(2, layout, sync=sync, optimizer={"name": "adamw"})
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tiny_net.rows(0).items()}
    loose, total = program.synchronizer, 0
    for step in range(8):
        plan = loose.strategy.plan(step)
        if plan.send is not None:
            expected, overlapped = loose.sent_bytes(plan.send), loose._overlapped_step(plan.send)
            sent = sent_between_replicas(program, overlapped.lower(program.state, batch))
            assert expected // 2 <= sent <= expected // 2 + 96
            total += expected
        if plan.exchange is not None:
            assert loose.sent_bytes(plan.exchange) == 0
            lowered = loose._exchange_program(plan.exchange).lower(program.state)
            assert sent_between_replicas(program, lowered) <= 96
    assert loose.round_bytes().total == loose.round_bytes().during == total
    if deltas == "none":
        assert loose.round_bytes() == (total, total // 4, total, 4)
        assert total == 64 * 4  # once the 64 parameters, as a ring of two


DECODER = {"embed": 64, "mlp": 128, "layers": 5, "sliding_window": None, "sliding_window_pattern": 1}


FSDP, TP, PIPELINE = {"fsdp": 2}, {"model": 2}, {"pipeline": 2, "data": 2}
SLOW = [(FSDP, "none"), (TP, "none"), (TP, "int4"), (PIPELINE, "int4")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mesh", "deltas"),
    [(FSDP, "int4"), (PIPELINE, "none"), *(pytest.param(*case, marks=pytest.mark.matrix) for case in SLOW)],
    ids=str,
)
def test_a_decoder_streams_the_layers_of_its_stack(mesh: dict[str, int], deltas: str) -> None:
    """The same numbers as on one device a replica, with layers that fragments do not divide."""
    compress = {"deltas": deltas}
    changes = {"steps": 16, "model": DECODER, "sync": streaming(2, 2, 0.5, 8, compress=compress)}
    rules = {**harness.RULES, "layers": ["pipeline"]}
    if "pipeline" in mesh:
        changes |= {"step": {"microbatches": 2}, "model": DECODER | {"layers": 6}}
    found = []
    for layout, options in (({}, {"batch": []}), (mesh, rules)):
        alone = {k: v for k, v in changes.items() if k != "step" or layout}
        program = harness.program({"replica": 2, **layout}, options, **alone)
        state, history = program.init(), []
        for step in range(9):
            state, metrics = program.step_at(step)(state, harness.placed(program, step))
            history.append(float(metrics["loss"]))
        found.append((history, jax.device_get(program.agreed(state)["params"])))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-5 if deltas == "none" else 1e-3)
    if deltas == "none":
        harness.close_trees(found[0][1], found[1][1], 1e-4)


def test_programs_are_shared_by_fragments_that_have_parts_of_the_same_parameters() -> None:
    """Only where the table and the last norm are sent is there another program."""
    program = harness.program(
        {"replica": 2}, {"batch": []}, model=DECODER | {"layers": 4}, sync=streaming(4, 3, 0.5, 16), steps=16
    )
    plans = [program.synchronizer.strategy.plan(step) for step in range(16)]
    kinds = {plan.send for plan in plans if plan.send is not None}
    assert sum(isinstance(plan.send, Send) for plan in plans) == 12
    assert len(kinds) <= 3


H100 = "h100:2x2"
NO_COMPILER = targets.missing_packages(targets.parse(H100), "xla")


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("deltas", ["none", "int4"])
def test_on_absent_h100_what_travels_is_started_before_the_layers_and_awaited_after(
    deltas: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean is started before the loops over layers and awaited after them; its two stages in int4 each span one."""
    for name, value in targets.environment(targets.parse(H100)).items():
        monkeypatch.setenv(name, value)
    from jaxtrain.core.program import build_program

    model = DECODER | {"embed": 256, "mlp": 1024, "layers": 4}
    cfg = harness.config(
        mesh={"replica": 2, "fsdp": 2}, rules=harness.RULES, model=model, precision="bf16", step={"attention": "xla"},
        sync=streaming(2, 2, 0.5, 12, compress={"deltas": deltas}),
    )  # fmt: skip
    program = build_program(cfg, 256, targets.devices(H100, "xla"))
    loose = program.synchronizer
    send = next(plan.send for plan in map(loose.strategy.plan, range(12)) if plan.send is not None)
    batch = batch_spec(cfg.data, cfg.data.global_batch)
    step: Any = loose._overlapped_step(send)
    text = step.lower(program.state, batch).compile().as_text()

    def is_between_replicas(start: parse.Instruction) -> bool:
        groups = device_groups.replica_groups(device_groups.replica_groups_text(start.attributes), 4)
        return device_groups.group_axes(groups, dict(program.sharder.mesh.shape))[0] == ("replica",)

    rows = count_collectives(text, dict(program.sharder.mesh.shape))
    numbers = sum(row.bytes for row in rows if "replica" in row.axes) - loose.sent_bytes(send) / 2
    assert 0 <= numbers < 96  # a replica has two devices
    module = parse.parse(text)
    entry = list(module.computations[module.entry].values())
    place = {one.name: n for n, one in enumerate(entry)}
    forward, backward = (n for n, one in enumerate(entry) if one.op == "while")

    def span(op: str) -> tuple[int, int]:
        """Places of start and done of the largest collective between replicas."""
        found = [(place[one.operands[0]], n) for n, one in enumerate(entry) if one.op == f"{op}-done"]
        between = [pair for pair in found if is_between_replicas(entry[pair[0]])]
        return max(between, key=lambda pair: entry[pair[1]].shape.bytes)

    if deltas == "none":
        start, done = span("all-reduce")
        assert start < forward
        assert done > backward
        return
    for op, loop in (("all-to-all", forward), ("all-gather", backward)):
        start, done = span(op)
        assert start < loop < done, op


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"sync": streaming(5, 1, 0.5, 12)},
            "sync.streaming.fragments: 5 fragments cannot take turns within 12 steps; expected a divisor, e.g. 3",
        ),
        (
            {"sync": streaming(2, 6, 0.5, 12)},
            "sync.streaming.tau: a fragment is due every 6 steps, and travels alone; expected at most 5",
        ),
        ({"sync": streaming(2, 1, 1.5, 12)}, "sync.streaming.alpha: expected at most 1"),
        ({"sync": streaming(2, -1, 0.5, 12)}, "sync.streaming.tau: expected at least 0"),
        (
            {"sync": streaming(3, 1, 0.5, 12)},
            "sync.streaming.fragments: 3 fragments of a model with 2 parameters, and no stack of layers",
        ),
        ({"sync": streaming(2, 1, 0.5, 10)}, "sync.every: the last 2 of 12 steps would be in no exchange"),
        (
            {"sync": {"strategy": "muloco", "every": 4}},
            "sync.strategy: muloco is diloco with Muon as the inner optimizer, and it is adamw; expected opt",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value["sync"].get("streaming", "muloco")),
)
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any], text: str, problems: Callable[..., str]) -> None:
    assert text in problems(**changes)


def test_muloco_is_diloco_with_muon_in_two_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    muon = {"optimizer": {"name": "muon", "lr": 0.02}}
    plain = tiny_net.config(sync={"strategy": "muloco", "every": 4})
    assert plain.sync.compress.deltas == "int2"
    assert plain.sync.compress.error_feedback
    assert tiny_net.config(sync={"strategy": "muloco", "compress": {"deltas": "none"}}).sync.compress.deltas == "none"
    assert tiny_net.config(sync={"strategy": "diloco"}).sync.compress.deltas == "none"
    ours, theirs = (
        run(replicas(2, "fsdp", sync=sync, **muon), 8)[1]
        for sync in (
            {"strategy": "muloco", "every": 4},
            {"strategy": "diloco", "every": 4, "compress": {"deltas": "int2"}},
        )
    )
    assert_equal_bits([each["params"] for each in ours], [each["params"] for each in theirs])
    result, _ = train(config(tmp_path, "run", {"strategy": "muloco", "every": 4}, **muon))
    (sent,) = {record["exchanged_bytes"] for record in records(result.run_dir) if "exchanged_bytes" in record}
    assert sent < 64 * 4
