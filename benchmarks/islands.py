"""Islands over slow, lossy and cut links: time to a loss, throughput, waiting, bytes and processor time.

    python benchmarks/islands.py [--parts loss links ...] [--ways bsp ...] [--mbit 200] [--minutes N] --out islands.json

Four islands and a head, each with a network of its own and a Ray node of its own (islands_network.py, as root), at a
bridge. tc limits the speed of a link in both directions. Coordinator and servers are on the head, so that all that an
island pushes and reads crosses its link; ways without a server send between islands, over the links of both. Parts
(islands_runs.py), each for the ways that it compares:

`loss`   wall time without validations until island 0 has the validation loss that all ways reach, over links of
         `--mbit`; beside it the bytes that the link has carried and those that the islands log as `exchanged_bytes`
`links`  tokens/s against the speed of the links, of bsp and diloco; without a limit they are those of `scale`. Beside
         them `planned tokens/s`, as `jaxtrain plan` has them (`planned_tokens`)
`head`   the same with the link of the head as slow as those of the islands, as a plan without `--server-dcn` assumes
`scale`  tokens/s, waiting, and processor seconds of the head per GB, by number of islands, size of the model and bits,
         without a limit; per GB as it was pushed, and per GB that the same pushes would have been in float32
`slow`   wall time to a loss and tokens/s when each step takes 0.1 s besides its computation, and when the last island
         takes 0.3 s, without a limit
`lossy`  wall time to a loss with links that lose 1% of the packets in each direction, and without that; a quarter of
         `--mbit`, and less training
`cut`    `loss` with the link of one island cut for 30 s, once island 0 has done half of its steps
`long_cut` two islands of a small model, of which one is cut for 120 s and goes on: losses at the end, and joins

tc drops packets by a filter of four instructions at both ends of a link, at random and without a seed. Lossy links
carry packets of at most 1500 bytes, others up to 64 KB at once. The former take 21 s of the processor for a GB, so that
one transfer between two machines has 420 to 500 Mbit/s without a limit (the others 7 to 16 Gbit/s) while other programs
run. That is why `lossy` has slower links. Over one of 200 Mbit/s, a transfer has 153 to 190 with 1% lost. What islands
send each other crosses two links. There is no delay but that of the queue of a link.

Time begins when each island has done its first exchange, and ends when the first island has done its last one; in
`loss`, `lossy` and `cut` it begins when each has done its first step. `waited` is the share of that time in which an
island waits between its push and its read. All islands and servers share the processor of one machine, so that without
a limit more islands make steps longer. `--out` keeps every run and is read again, so that a call goes on where the last
one stopped. A run that fails is kept with its error, and tried again by the next call.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import islands_network
from islands_figures import POLL, figures, read, tables
from islands_runs import PARTS, WAYS, Run, config_of, runs_of, with_defaults

from jaxtrain.errors import UserError
from jaxtrain.launch.islands.options import IslandsOptions
from jaxtrain.launch.islands.run import open_run

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
    "PYTHONPATH": f"{islands_network.ROOT}:{islands_network.ROOT / 'benchmarks'}",
}  # fmt: skip
LIMIT = 900.0  # seconds of a run


def measure(run: Run, net: islands_network.Network) -> dict[str, Any]:
    """Runs the islands once, each by a launcher on its machine."""
    net.limit(run.mbit, run.head_mbit)
    net.lose(run.lost)
    with tempfile.TemporaryDirectory(prefix="islands", ignore_cleanup_errors=True) as folder:
        options = IslandsOptions(str(config_of(run, Path(folder))), (), None, None)
        _, directory, _ = open_run(options)
        command = [sys.executable, "-m", "jaxtrain.cli.main", "launch", "islands", str(directory)]
        command += ["--address", f"{islands_network.HEAD}:{islands_network.PORT}", "--max-restarts"]
        command += ["3" if run.cut else "0"]  # TCP tries a cut link again so late that an island may stop waiting
        launchers = [
            net.start(index, [*command, "--here", str(index)], Path(folder, f"{index}.log"))
            for index in range(run.islands)
        ]
        samples = list(watch(run, launchers, net, directory))
        for index, launcher in enumerate(launchers):
            if launcher.returncode:
                own = [Path(folder, f"{index}.log"), directory / f"island-{index}" / "output.log"]
                said = "\n".join(file.read_text(errors="replace")[-1500:] for file in own if file.exists())
                raise RuntimeError(f"launcher {index} ended with {launcher.returncode}:\n{said.strip()}")
        return run.key | figures(run, read(run, directory, samples))


def watch(
    run: Run, launchers: Sequence[subprocess.Popen], net: islands_network.Network, directory: Path
) -> Iterator[dict[str, Any]]:
    """Yields samples until all launchers have ended; cuts a link and mends it."""
    until, mend_at = time.monotonic() + LIMIT, math.inf if run.cut else 0.0
    while any(launcher.poll() is None for launcher in launchers):
        failed = any(launcher.returncode for launcher in launchers)
        if failed or time.monotonic() > until:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
            if not failed:
                raise RuntimeError(f"not done after {LIMIT:.0f} s")
            return
        try:
            status = json.loads((directory / "server" / "status.json").read_text())["islands"]
        except OSError:
            status = {}
        if mend_at == math.inf and status.get("0", {}).get("clock", 0) >= run.steps // 2:
            net.lose(1.0, run.islands - 1)
            mend_at = time.monotonic() + run.cut
        elif 0 < mend_at < time.monotonic():
            net.lose(run.lost, run.islands - 1)
            mend_at = 0.0
        waited = {int(index): island.get("waited", 0.0) for index, island in status.items()}
        yield {"time": time.time(), "links": net.sent(), "head": net.head_seconds(), "waited": waited}
        time.sleep(POLL)


def on_networks(missing: Sequence[Run]) -> Iterator[tuple[Run, islands_network.Network]]:
    """Yields each run with a network of as many islands: idle Ray nodes beside it would take processor time."""
    for islands in dict.fromkeys(run.islands for run in missing):
        with islands_network.network(islands, ENVIRONMENT) as net:
            yield from ((run, net) for run in missing if run.islands == islands)


def measure_all(args: Any, runs: list[dict[str, Any]], missing: Sequence[Run], about: dict[str, Any]) -> None:
    """Measures runs and adds them to those that are known, each with its error if it fails.

    Args:
        args: of the command line.
        runs: that are known.
        missing: those to measure.
        about: the machine.
    """
    end = time.monotonic() + 60 * args.minutes
    with contextlib.closing(on_networks(missing)) as runs_on_networks:
        for run, net in runs_on_networks:
            begun = time.monotonic()
            if begun > end:
                break
            try:
                found = measure(run, net)
                said = f"{found['tokens_per_second']:,.0f} tokens/s"
            except (RuntimeError, UserError) as error:
                found, said = run.key | {"error": str(error)}, f"FAILED: {error}"
            runs[:] = [known for known in runs if not is_same(run, known)] + [found]
            more = " ".join(f"{key} {value}" for key, value in run.key.items() if value)
            print(f"{more}: {said}, {time.monotonic() - begun:.0f} s in all", flush=True)
            common.report("islands", args, {"tables": tables(runs), "runs": runs}, about)


def is_same(run: Run, known: dict[str, Any]) -> bool:
    """Returns whether a record is one of the run."""
    return run.key.items() <= with_defaults(known).items()


def main() -> None:
    """Measures what is missing; prints the tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="only runs of these")
    parser.add_argument("--mbit", type=float, default=200.0, help="speed of the links where it is not varied")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    args = parser.parse_args()
    os.environ |= ENVIRONMENT
    about = common.machine("ray")
    print(common.title(about))
    runs = json.loads(args.out.read_text())["results"]["runs"] if args.out and args.out.exists() else []
    planned = [run for part in args.parts for run in runs_of(part, args.mbit, args.quick) if run.way in args.ways]
    missing = [run for run in planned if not any("error" not in known and is_same(run, known) for known in runs)]
    if missing:
        measure_all(args, runs, missing, about)
    for part, rows in tables(runs).items():
        print(f"{part}\n{common.table(rows)}")
    common.report("islands", args, {"tables": tables(runs), "runs": runs}, about)


if __name__ == "__main__":
    main()
