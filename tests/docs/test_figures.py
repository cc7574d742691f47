"""Every figure of README and docs is that of a results file, or of a plan that is made again."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from pages import ROOT, blocks, joined

Results = Any


def results(name: str) -> Results:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["results"]


def faults(found: Results, *places: str) -> int:
    """Faults of a chaos benchmark at some places."""
    return sum(row["faults"] for row in found["places"] if row["place"] in places)


def chaos() -> list[Any]:
    alone, launched = results("cpu-chaos"), results("cpu-chaos-processes")
    assert alone["wrong"] == launched["wrong"] == 0
    return [
        alone["deaths"], len(alone["runs"]), launched["deaths"], len(launched["runs"]), faults(launched, "leader"),
        faults(launched, "stopped"), faults(launched, "hangup", "pipe"), faults(launched, "stranger"),
        faults(alone, "full_disk") + faults(launched, "full_disk"), faults(alone, "corrupt"),
    ]  # fmt: skip


def plans_of_a_gpu() -> list[Any]:
    found = results("h200-plan-absent")["gpu"]
    ratios = sorted(row["memory ratio"] for row in found["rows"])
    times = found["agreement"]["wall s"]
    return [len(ratios), times["least"], times["most"], ratios[0], ratios[-1], times["tau"]]


def published_runs() -> list[Any]:
    rows = [row for row in results("plan-accuracy")["published"]["rows"] if row["known"] == "test"]
    out: list[Any] = []
    for kind in ("a100", "h100", "v"):
        ratios = [row["ratio"] for row in rows if row["target"].startswith(kind) and "ratio" in row]
        out += [sum(abs(ratio - 1) <= 0.15 for ratio in ratios), len(ratios)]
    return [*out, 100 * (max(row.get("ratio", 0) for row in rows) - 1)]


def leader() -> list[Any]:
    (row,) = (row for row in results("cpu-control-plane") if row["agents"] == 1000)
    seconds_of_a_beat = 1e-6 * row["cpu/beat"] * 1000 / 5  # the default heartbeat of 20 s is four messages
    return [row["agents"], 100 * seconds_of_a_beat, row["closed"] + row["next"], row["adopted"]]


def soak() -> list[Any]:
    rows = results("cpu-soak")["one process"]
    return [rows[-1]["memory_mib"] - rows[1]["memory_mib"]]


def growth() -> list[Any]:
    found = results("cpu-scale")
    exponents = [found["saves"]["exponents"]["save s"], found["tensors"]["exponents"]["restore s"]]
    assert all(exponent < 1.1 for exponent in exponents)
    plans = found["devices"]["rows"]
    assert plans[-1]["plan s"] < 1.2 * plans[0]["plan s"]
    return [found["saves"]["rows"][-1]["processes"], found["tensors"]["rows"][-1]["tensors"], plans[-1]["devices"]]


def agreement(way: str, size: str = "small") -> list[Any]:
    """Distance of the loss in percent, and how many times fewer bytes."""
    (row,) = (row for row in results("cpu-sync")["table"][size] if row["way"] == way)
    return [abs(float(row["against"].partition("%")[0])), row["fewer"]]


def islands(way: str) -> list[Any]:
    tables = results("cpu-islands")["tables"]
    row, cut, lossy = (next(row for row in tables[part] if row["way"] == way) for part in ("loss", "cut", "lossy"))
    sent = row["link sent MB"] / 1000
    return [row["seconds"], 1 / row["step s"], 100 * row["link busy"], sent, cut["lowest times"], lossy["times"]]


def by_link(way: str, column: str) -> list[Any]:
    """A column of tokens/s by the speed of the links, the slowest first."""
    rows = [row for row in results("cpu-islands")["tables"]["links"] if row["way"] == way]
    assert [row["Mbit/s"] for row in rows] == [50, 200, 800, None]
    return [row[column] for row in rows if row[column] is not None]


def planned_by_link() -> list[Any]:
    ratios = [ratio for way in ("bsp", "diloco") for ratio in by_link(way, "planned/found")]
    assert len(ratios) == 6
    heads = [row["planned/found"] for row in results("cpu-islands")["tables"]["head"]]
    assert len(heads) == 4
    return [min(ratios), max(ratios), min(heads), max(heads)]


def with_a_slow_island() -> list[Any]:
    found = {row["way"]: row for row in results("cpu-islands")["tables"]["slow"]}
    ways = ("asp", "bsp", "ssp", "diloco", "diloco without server", "streaming", "gossip")
    left = [100 * found[way]["left"] for way in ways]
    return [*(found[way]["times"] for way in ways), left[0], min(left[1:]), max(left[1:])]


def beside_the_law() -> list[Any]:
    found = results("cpu-islands-law")
    one, two, four = found["table"][1:]
    gaps = [row[key] for key in ("gap %", "law %") for row in (one, two, four)]
    return [found["parameters"], *gaps, four["published, 35M %"]]


def disturbed_islands() -> list[Any]:
    found = results("cpu-islands-faults")
    assert {row["bar"] for row in found["table"]} == {"met"}
    assert not any(run["lost"] or run["left"] or run["islands_left"] or run["code"] for run in found["runs"])
    whole = [run["losses"] for run in found["runs"] if run["name"] in ("undisturbed", "again") and run["seed"] == 0]
    assert whole == [[whole[0][0]] * 4] * 2
    rows = [row for row in found["table"] if row["faults"] != "-"]
    kinds = [fault.partition("@")[0].partition("-")[0] for row in rows for fault in row["faults"].split()]
    far = [float(row["against"].rstrip("%")) for row in rows]
    (other,) = (run["losses"][0] for run in found["runs"] if (run["name"], run["seed"]) == ("undisturbed", 1))
    counts = [kinds.count(kind) for kind in ("worker", "server", "stop", "late")]
    return [len(rows), *counts, -min(far), max(far), whole[0][0], 100 * (other / whole[0][0] - 1)]


def quickstart() -> list[Any]:
    found = results("cpu-quickstart")
    return [found["seconds"], found["eval/loss"]]


FOUR = ("diloco-4", "diloco-int4-4", "streaming-4", "local_sgd", "gossip-exponential", "asp", "muloco-float32-4")
LARGE = ("diloco-int4-2", "streaming-int4-2")

ISLANDS = "| {:.0f} | {:.2f} | {:.0f}% | {:.2f} GB | {:.2f} | {:.2f} |"
# (page, its sentence with a place for each figure, the figures)
SENTENCES: list[tuple[str, str, Callable[[], list[Any]]]] = [
    (
        "docs/start.md",
        "it takes {:.0f} s, from an empty folder without caches, and ends with a validation loss of {:.2f}",
        quickstart,
    ),
    (
        "docs/reliability.md",
        "{} deaths in {} runs of one process, and {} in {} launched runs, at seeded places, {} of them of the leader: "
        "the losses of the undisturbed run bit by bit, the same tokens in every row, no file left behind "
        "(`make chaos`). Among them {} leaders that were stopped, {} closed terminals and pipes, {} visits of "
        "strangers, {} full disks and {} damaged checkpoints.",
        chaos,
    ),
    (
        "docs/reliability.md",
        "One leader serves {:,} agents with {:.0f}% of a core, starts their next generation {:.1f} s after a closed "
        "connection, and is followed by another one within {:.1f} s of its death",
        leader,
    ),
    (
        "docs/reliability.md",
        "The coordination of a save grows linearly to {:,} processes, checkpoints to {:,} tensors; a layout is checked "
        "and a plan made for {:,} devices in the time of 512",
        growth,
    ),
    ("docs/reliability.md", "Memory grows by {:.0f} MiB in the second half of one process", soak),
    (
        "docs/plan.md",
        "For {} configurations on one H200, planned on a machine without a GPU, the planned times were {:.2f} to "
        "{:.2f} of the measured ones and the memory {:.2f} to {:.2f} (Kendall's tau of the times {:.2f})",
        plans_of_a_gpu,
    ),
    (
        "docs/plan.md",
        "{} of {} on A100, {} of {} on H100 and {} of {} on TPUs are predicted within 15%; the worst, on H100, is "
        "predicted {:.0f}% too fast",
        published_runs,
    ),
    ("docs/islands.md", "| `bsp` " + ISLANDS, lambda: islands("bsp")),
    ("docs/islands.md", "| `ssp`, bound 3 " + ISLANDS, lambda: islands("ssp")),
    ("docs/islands.md", "| `asp` " + ISLANDS, lambda: islands("asp")),
    ("docs/islands.md", "| `diloco`, every 16 " + ISLANDS, lambda: islands("diloco")),
    ("docs/islands.md", "| `diloco` without a server " + ISLANDS, lambda: islands("diloco without server")),
    ("docs/islands.md", "| `streaming_diloco` without a server " + ISLANDS, lambda: islands("streaming")),
    ("docs/islands.md", "| `gossip`, every 8 " + ISLANDS, lambda: islands("gossip")),
    (
        "docs/islands.md",
        "| `bsp` | {:,.0f} | {:,.0f} | {:,.0f} | {:,.0f} | | planned | {:,.0f} | {:,.0f} | {:,.0f} | |",
        lambda: by_link("bsp", "tokens/s") + by_link("bsp", "planned tokens/s"),
    ),
    (
        "docs/islands.md",
        "| `diloco`, every 16 | {:,.0f} | {:,.0f} | {:,.0f} | {:,.0f} | | planned | {:,.0f} | {:,.0f} | {:,.0f} | |",
        lambda: by_link("diloco", "tokens/s") + by_link("diloco", "planned tokens/s"),
    ),
    (
        "docs/islands.md",
        "What is planned is {:.2f} to {:.2f} times what was measured. A plan without `--server-dcn` is more careful: "
        "it takes the link of the head for as slow as those of the islands, which then share it. Where that was so, it "
        "is {:.2f} to {:.2f} times what was measured",
        planned_by_link,
    ),
    (
        "docs/islands.md",
        "{} runs with {} killed islands, {} killed servers, {} islands stopped for 30 s and {} late ones, alone and in "
        "ten drawn schedules, against an undisturbed one. All end by themselves and leave no process, every push that "
        "was acknowledged is in an update, and the validation losses are from {:.1f}% below to {:.1f}% above {:.3f}, "
        "that of the undisturbed run; another seed is {:.1f}% above it.",
        disturbed_islands,
    ),
    (
        "docs/islands.md",
        "`asp` takes {:.1f} times as long to the same loss, `bsp` {:.1f}, `ssp` {:.1f}, `diloco` {:.1f}, and without a "
        "server `diloco` {:.1f}, `streaming_diloco` {:.1f} and `gossip` {:.1f}. Of its tokens/s `asp` keeps {:.0f}%, "
        "the others {:.0f} to {:.0f}%",
        with_a_slow_island,
    ),
    (
        "docs/islands.md",
        "a decoder of {:,} parameters: as many tokens for all, each with its own learning rate, an exchange every 30 "
        "steps. The loss of `diloco` is {:.1f}% above that of data parallel with one island, {:.1f}% with two and "
        "{:.1f}% with four; the published power laws have {:.1f}%, {:.1f}% and {:.1f}% for that size, and {:.1f}% was "
        "measured with four replicas of 35M parameters",
        beside_the_law,
    ),
    (
        "docs/synchronisation.md",
        "{:.1f}% higher for `diloco` in 4 bits with two replicas, which send {:.0f} times fewer bytes",
        lambda: agreement("diloco-int4-2"),
    ),
    (
        "docs/synchronisation.md",
        "{:.1f}% for `streaming_diloco` in 4 bits at {:.0f} times fewer",
        lambda: agreement("streaming-int4-2"),
    ),
    (
        "docs/synchronisation.md",
        "PowerSGD of rank 4 with 1,000 first steps in float32 is {:.1f}% below",
        lambda: agreement("bsp-powersgd-4")[:1],
    ),
    (
        "docs/synchronisation.md",
        "With four replicas it is {:.1f}% higher for `diloco`, {:.1f}% in 4 bits, {:.1f}% for `streaming_diloco`, "
        "{:.1f}% for `local_sgd`, {:.1f}% for `gossip` over the exponential graph, {:.1f}% for `asp`; `muloco` ends "
        "{:.1f}% below",
        lambda: [agreement(way)[0] for way in FOUR],
    ),
    (
        "docs/synchronisation.md",
        "with two replicas and as many steps, `diloco` in 4 bits ends {:.1f}% above `bsp`, `streaming_diloco` in 4 "
        "bits {:.1f}%; after half as many {:.1f}% and {:.1f}%",
        lambda: [agreement(way, size)[0] for size in ("large", "large-half") for way in LARGE],
    ),
]


@pytest.mark.parametrize("size", ["small", "large", "large-half"])
def test_the_table_of_ways_is_that_of_the_results(size: str):
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for row in results("cpu-sync")["table"][size]:
        start = f"| `{row['way']}` | {row['replicas']} | {row['lr']} ({row['tried']}) | {row['loss']:.4f} | "
        assert start + row["against"].partition(" ")[0] in text
        assert f"| {row['bytes a step']:,} | {row['fewer']:.1f} | {row['bar']} |" in text


@pytest.mark.parametrize("size", ["small", "large"])
def test_each_way_is_at_the_best_of_its_learning_rates_and_not_at_an_end_of_them(size: str):
    runs = [run for run in results("cpu-sync")["runs"] if run["size"] == size]
    for row in results("cpu-sync")["table"][size]:
        losses = {run["lr"]: run["losses"][-1] for run in runs if run["way"] == row["way"]}
        best = min(losses, key=losses.__getitem__)
        assert float(row["lr"]) == pytest.approx(best)
        for other in (best / 2, best * 2):
            assert any(rate == pytest.approx(other) for rate in losses), (row["way"], other)


def test_the_tables_of_islands_are_those_of_the_results():
    tables = results("cpu-islands")["tables"]
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for row in tables["scale"]:
        head = ("coordinator cpu s/GB", "servers cpu s/GB", "ray of head cpu s/GB", "head cpu s/float32 GB")
        figures = f"{row['tokens/s']:,.0f} | {1000 * row['step s']:,.0f} | {row['waited']:.2f} | "
        assert f"| {row['islands']} | {figures}{' | '.join(f'{row[key]:.1f}' for key in head)} |" in text
    for row in tables["slow"]:
        times = f"{row['seconds']:.0f} | {row['seconds with slow']:.0f} | {row['times']:.2f}"
        tokens = f"{row['tokens/s']:,.0f} | {row['tokens/s with slow']:,.0f} | {row['left']:.2f}"
        assert f" | {times} | {tokens} | {row['waited of others']:.2f} | {row['waited of slow']:.2f} |" in text
    for way in ("bsp", "diloco"):
        rows = [row for row in tables["head"] if row["way"] == way]
        found, planned = (" | ".join(f"{row[key]:,.0f}" for row in rows) for key in ("tokens/s", "planned tokens/s"))
        assert f"| {way} | {found} |\n| planned | {planned} |" in text


def test_the_table_beside_the_scaling_laws_is_that_of_the_results():
    text = (ROOT / "benchmarks" / "README.md").read_text()
    for row in results("cpu-islands-law")["table"]:
        gaps = " | ".join(f"{row[key]:+.1f}%" if row[key] else "0" for key in ("gap %", "law %", "published, 35M %"))
        assert f"| {row['way']} | {row['rate']} ({row['tried']}) | {row['loss']:.4f} | {gaps} |" in text


@pytest.mark.parametrize(("page", "sentence", "figures"), SENTENCES)
def test_a_sentence_has_the_figures_of_its_results(page: str, sentence: str, figures: Callable[[], list[Any]]):
    text = " ".join((ROOT / page).read_text().split())
    assert sentence.format(*figures()) in text


HAS_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
NEEDS_COMPILER = pytest.mark.skipif(
    not HAS_COMPILER, reason="compiles for absent GPUs: pip install 'jaxtrain[plan-gpu]'"
)


def plans() -> list[tuple[list[str], str]]:
    """Each plan of the page that is followed by its output."""
    pairs = [(joined(one.text).splitlines()[-1], after) for one, after in pairwise(blocks("docs/plan.md"))]
    return [
        (line.split(), after.text)
        for line, after in pairs
        if line.startswith("jaxtrain plan ") and after.language == "text"
    ]


@pytest.mark.sampled(2)
@NEEDS_COMPILER
@pytest.mark.parametrize(("words", "said"), plans(), ids=lambda value: value[2] if isinstance(value, list) else "")
def test_a_plan_prints_what_the_page_shows(words: list[str], said: str):
    command = [sys.executable, "-m", "jaxtrain.cli.main", *words[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = iter([line.rstrip() for line in done.stdout.splitlines()])
    for line in said.splitlines():
        assert line in ("", "...") or line in printed, line  # in this order


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value, also those in texts."""
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers(inner)
    elif isinstance(value, str):
        yield from (float(found) for found in re.findall(r"\d+\.\d+", value))
    elif isinstance(value, int | float):
        yield float(value)


def is_in(figure: str, file: str) -> bool:
    """True if a figure is a number of a results file, rounded to its digits; thousands, percent and milli too."""
    wanted, digits = float(figure.replace(",", "")), len(figure.partition(".")[2].partition("e")[0])
    step = 10.0**-digits * (10.0 ** int(figure.partition("e")[2]) if "e" in figure else 1.0)
    stored = list(numbers(json.loads((ROOT / "benchmarks" / file).read_text())))
    factors = (1, 100, 1000, 1e-3, 1e-9)
    return any(abs(factor * value - wanted) <= 0.501 * step for value in stored for factor in factors)


def test_figures_are_those_of_results_files():
    page = (ROOT / "docs/performance.md").read_text()
    rows = re.findall(r"^\|(.*)\| ([^|]+) \|[^|]*\| `(results/[\w.-]+\.json)` \|$", page, re.MULTILINE)
    assert len(rows) >= 9
    for what, figures, file in rows:
        for figure in re.findall(r"\d[\d,.]*(?:e-?\d+)?", figures):
            assert is_in(figure, file), (what, figure, file)


def test_a_wrong_figure_is_found():
    assert is_in("620.1", "results/h200-mfu-7b.json")
    assert not is_in("621.1", "results/h200-mfu-7b.json")


@pytest.mark.parametrize(
    ("figure", "file"),
    [
        ("62.7", "h200-mfu-7b"),
        ("55.5", "h100-mfu-7b"),
        ("58.7", "h200-mfu-1b-first"),
        ("60.7", "h200-mfu-1b"),
        ("1.58", "h200-peer-torch"),
    ],
)
def test_figures_of_the_features(figure: str, file: str):
    assert figure in (ROOT / "docs/features.md").read_text()
    assert is_in(figure, f"results/{file}.json")
