"""Shared code of the benchmarks: machine, tables, JSON, packed batches, child processes."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("jax", "flax", "optax", "numpy")


def machine(*packages: str) -> dict[str, Any]:
    """Describes the machine: processor, cores, memory, versions; devices if JAX is imported.

    Args:
        packages: further packages whose versions to list.
    """
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    processor = names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    out = {"processor": processor, "cores": cores, "memory_gib": round(memory, 1)}
    if "jax" in sys.modules:
        import jax

        out["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return out | versions


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Parser with the options of every benchmark: `--out` and `--quick`."""
    out = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--out", type=Path, help="JSON file to write")
    out.add_argument("--quick", action="store_true", help="smallest sizes, to see that it runs: no figures to quote")
    return out


def report(
    name: str, args: argparse.Namespace, results: Any, machine: Mapping[str, Any], note: str | None = None, **more: Any
) -> None:
    """Writes the JSON of a benchmark to `--out`: benchmark, machine, settings, results."""
    if note:
        print(note)
    if args.out is None:
        return
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("out", "child")}
    record = {"benchmark": name, "machine": dict(machine), "settings": settings, "results": results, **more}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def title(machine: Mapping[str, Any]) -> str:
    """Describes the machine in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def table(rows: Sequence[Mapping[str, Any]], digits: int = 3) -> str:
    """Formats rows with the same keys as a table; numbers are aligned to the right."""
    if not rows:
        return "(nothing measured)"
    columns = list(rows[0])
    cells = [columns] + [[_cell(row.get(column), digits) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    is_text = [isinstance(rows[0].get(column), str) for column in columns]
    lines = ("  ".join(c.ljust(w) if t else c.rjust(w) for c, w, t in zip(line, widths, is_text)) for line in cells)
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}" if abs(value) < 1 else f"{value:.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(values) < 2:
        return dict.fromkeys(("median", "q1", "q3"), values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def median_interval(values: Sequence[float], resamples: int = 4000) -> dict[str, float]:
    """Ends of the 95% interval of the median, by the bootstrap; the same for the same values."""
    rng, array = np.random.default_rng(0), np.asarray(values, float)
    medians = np.median(array[rng.integers(0, len(array), (resamples, len(array)))], axis=1)
    return {"low": float(np.quantile(medians, 0.025)), "high": float(np.quantile(medians, 0.975))}


def next_rate(losses: Mapping[float, float], first: float) -> float | None:
    """The learning rate to try next, given the last losses of those tried (inf: it diverged).

    Returns `first`, then the half and the double of the best one; None once both are known.
    """
    if not losses:
        return first
    best = min(losses, key=lambda rate: losses[rate] if math.isfinite(losses[rate]) else math.inf)
    return next((rate for rate in (best / 2, best * 2) if not any(math.isclose(rate, known) for known in losses)), None)


def medians(programs: Mapping[str, Callable], arrays: Sequence[Any], repeats: int) -> dict[str, float]:
    """Median seconds of each program on the same arrays; runs of different programs are interleaved."""
    import jax

    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            if turn:  # the first one warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def in_child(script: str, spec: Mapping[str, Any], env: Mapping[str, str] | None = None, timeout: float = 540) -> dict:
    """Runs `python script --child SPEC` in a fresh process and returns the JSON object on its last line.

    Returns {"error": last line of stderr} if it fails, so that one point does not end the others.
    """
    command = [sys.executable, script, "--child", json.dumps(spec)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | (env or {}), timeout=timeout)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = [line for line in done.stderr.strip().splitlines() if line.strip()]
        if os.environ.get("BENCHMARK_DEBUG"):
            print(done.stderr, file=sys.stderr)
        return {"error": said[-1][-400:] if said else f"exit status {done.returncode}"}
    return json.loads(lines[-1])


def packed_batch(seed: int, rows: int, length: int, vocab: int, documents: int) -> dict[str, np.ndarray]:
    """Batch as the data package packs it: `documents` random documents per row, no padding; arrays [rows, length]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, vocab, (rows, length + 1), dtype=np.int32)
    inner = np.arange(1, length)
    cuts = np.sort(np.stack([rng.choice(inner, documents - 1, replace=False) for _ in range(rows)]), axis=1)
    starts = np.zeros((rows, length), np.int32)
    np.put_along_axis(starts, cuts, 1, axis=1)
    first = np.maximum.accumulate(np.where(starts, np.arange(length), 0), axis=1)
    is_last = np.concatenate([starts[:, 1:], np.zeros((rows, 1), np.int32)], axis=1) == 1
    return {
        "tokens": tokens[:, :-1],
        "targets": np.where(is_last, 0, tokens[:, 1:]).astype(np.int32),
        "positions": (np.arange(length) - first).astype(np.int32),
        "segments": (np.cumsum(starts, axis=1) + 1).astype(np.int32),
        "weights": np.where(is_last, 0.0, 1.0).astype(np.float32),
    }


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    import resource

    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def reset_peak_rss() -> bool:
    """Resets `peak_rss`; returns False if the system can not."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def remat(policy: str | Sequence[str]) -> dict[str, Any]:
    """Keys of `step` for `none`, `full`, `dots` or the names of the values to save."""
    if isinstance(policy, str):
        return {"remat": policy}
    return {"remat": "full", "remat_save": dict.fromkeys(policy, "device")}
