"""Moves arrays between two independent JAX processes of one machine: Ray's object store against JAX's transfer server.

    python benchmarks/islands_transport.py [--sizes 1 64 512] [--repeats 15] [--sockets 1] [--out FILE]

Process A has a float32 array on its device, process B wants it on its own; both have one CPU device and share no
jax.distributed. Measured end to end: from the ready jax.Array of A to the ready jax.Array of B, with everything that
tells B where the array is. An array is new in each turn, and B looks at its values after the clock has stopped.

`ray`         A puts the NumPy view of its array into the object store (ray.put) and the reference into a mailbox, an
              actor, where B waits for it; B reads it (ray.get) and puts it on its device. A CPU device takes the
              memory of the store as it is (`aliased`), so that B's array stays there
`ray_copied`  the same, but B's array gets memory of its own, as on any other device
`transfer`    jax.experimental.transfer over loopback: A offers the array (await_pull) and tells B its number over a
              Unix socket; B pulls it

Processes are `plain`, each started by itself in a session of its own and connected to Ray by address, or `actors` of
one Ray driver. All ways run interleaved in the same two processes. Beside the median with quartiles and GB/s:

`cpu s/GB`    processor seconds for 1e9 bytes: all threads of A, of B and, for the ways of Ray, of its other processes
              (raylet, GCS, mailbox, agents), each while the array is on its way
`put`         seconds in A until the array is in the store; `place`: in B from there to the device

Needs Ray (`pip install ray`), which listens on 127.0.0.1 alone here and wants a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import product
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import common
import numpy as np

from jaxtrain.io.system import exit_with_parent

WAYS = ("ray", "ray_copied", "transfer")
VALUES = 250_000  # float32 values of an MB
WARM = 2  # turns that are not counted
LIMIT = 540.0  # seconds for all turns of a pair of processes
WAIT = 60.0  # seconds for one array
NAMESPACE, MAILBOX = "islands", "mailbox"
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as on those systems, Ray then binds to 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
}
QUIET = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR, "namespace": NAMESPACE}


class Mailbox:
    """Actor that holds references until they are taken."""

    def __init__(self) -> None:
        self._held: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def give(self, references: list[Any]) -> None:
        await self._held.put(references)

    async def take(self) -> list[Any]:
        return await self._held.get()


class Sender:
    """Process A.

    Args:
        spec: of the pair: `main`, the process that started Ray; `folder`; `sockets`.
        peer: connection to B.
    """

    def __init__(self, spec: Mapping[str, Any], peer: Connection) -> None:
        import ray

        self._mailbox = ray.get_actor(MAILBOX)
        self._server, self._peer, self._main, self._number = _server(spec["sockets"]), peer, spec["main"], 0
        peer.send(self._server.address())
        self._other = _receive(peer)["pid"]

    def turn(self, way: str, values: int) -> dict[str, Any]:
        """Moves an array; returns its seconds."""
        import jax
        import jax.numpy as jnp

        self._number += 1
        x = jax.block_until_ready(jnp.arange(values, dtype=jnp.float32) + self._number)
        helpers = _descendants(self._main) - {os.getpid(), self._other} if way != "transfer" else set()
        job = {"way": way, "values": values, "number": self._number}
        helped, own, begun = sum(map(_cpu, helpers)), time.process_time(), time.perf_counter()
        held, stored = self._offer(job, x)
        answer = _receive(self._peer)
        cpu = {"A": time.process_time() - own, "B": answer["cpu"], "Ray": sum(map(_cpu, helpers)) - helped}
        del held
        assert answer["is_right"], f"{way} brought other values"
        marks = {"put": stored - begun, "place": answer["done"] - answer["there"]}
        return {"seconds": answer["done"] - begun, "cpu": cpu, "aliased": answer["aliased"], **marks}

    def _offer(self, job: dict[str, Any], x: Any) -> tuple[Any, float]:
        """Hands the array over; returns what has to live until B has it, and when it was ready for B."""
        import ray

        if job["way"] == "transfer":
            self._server.await_pull(job["number"], x)
            self._peer.send(job)
            return x, time.perf_counter()
        self._peer.send(job)
        reference, stored = ray.put(np.asarray(x)), time.perf_counter()
        return (reference, self._mailbox.give.remote([reference])), stored


class Receiver:
    """Process B; the arguments are those of `Sender`."""

    def __init__(self, spec: Mapping[str, Any], peer: Connection) -> None:
        import jax
        import ray

        self._mailbox = ray.get_actor(MAILBOX)
        self._device, self._server = jax.devices()[0], _server(spec["sockets"])
        self._connection = self._server.connect(_receive(peer))
        peer.send({"pid": os.getpid()})

    def turn(self, job: dict[str, Any]) -> dict[str, Any]:
        """Gets an array onto the device."""
        own = time.process_time()
        y, there, aliased = (self._pull if job["way"] == "transfer" else self._get)(job)
        done, cpu = time.perf_counter(), time.process_time() - own
        places = np.linspace(0, job["values"] - 1, 101).astype(np.int64)
        is_right = y.shape == (job["values"],) and np.array_equal(
            np.asarray(y)[places], places.astype(np.float32) + np.float32(job["number"])
        )
        return {"done": done, "there": there, "cpu": cpu, "aliased": aliased, "is_right": bool(is_right)}

    def _pull(self, job: dict[str, Any]) -> tuple[Any, float, bool]:
        import jax

        sharding = jax.sharding.SingleDeviceSharding(self._device)
        shape = jax.ShapeDtypeStruct((job["values"],), np.float32, sharding=sharding)
        y = jax.block_until_ready(self._connection.pull(job["number"], shape))
        return y, time.perf_counter(), False

    def _get(self, job: dict[str, Any]) -> tuple[Any, float, bool]:
        import jax
        import jax.numpy as jnp
        import ray

        (reference,) = ray.get(self._mailbox.take.remote(), timeout=WAIT)
        array, there = ray.get(reference, timeout=WAIT), time.perf_counter()
        y = jax.device_put(array, self._device)  # may_alias=False makes no difference
        y = jax.block_until_ready(y if job["way"] == "ray" else jnp.copy(y))
        return y, there, y.unsafe_buffer_pointer() == array.ctypes.data


def _server(sockets: int) -> Any:
    """Transfer server on loopback. Without addresses for the data JAX 0.10 aborts the process at the first pull."""
    import jax
    from jax.experimental import transfer

    return transfer.start_transfer_server(jax.devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * sockets)


def _receive(peer: Connection) -> Any:
    if not peer.poll(WAIT):
        raise TimeoutError(f"the other process says nothing for {WAIT:.0f} s")
    return peer.recv()


def _descendants(root: int) -> set[int]:
    """Processes that descend from one."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def _cpu(process: int) -> float:
    """Processor seconds of a process, to the nanosecond: the clock that clock_getcpuclockid names; 0 if it is gone."""
    try:
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return 0.0


def run_side(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs A or B, in a process that is connected to Ray; A returns all turns that count."""
    place = str(Path(spec["folder"], spec["socket"]))
    if spec["side"] == "B":
        with _connected(place) as peer:
            receiver = Receiver(spec, peer)
            while job := _receive(peer):
                peer.send(receiver.turn(job))
        return []
    turns = []
    with Listener(place, "AF_UNIX") as listener, listener.accept() as peer:
        sender = Sender(spec, peer)
        for size in spec["sizes"]:
            for turn in range(WARM + spec["repeats"]):
                for i in range(len(WAYS)):
                    way = WAYS[(turn + i) % len(WAYS)]  # none is always first
                    measured = sender.turn(way, size * VALUES)
                    if turn >= WARM:
                        turns.append({"MB": size, "way": way, **measured})
        peer.send(None)
    return turns


def _connected(place: str) -> Connection:
    """Connection to A, which may still be starting."""
    until = time.monotonic() + WAIT
    while True:
        try:
            return Client(place, "AF_UNIX")
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def actors(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of both sides as actors of the driver in this process."""
    import ray

    class Side:
        def run(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
            return run_side(spec)

    sides = {side: ray.remote(num_cpus=0)(Side).remote() for side in "AB"}
    results = {side: actor.run.remote({**spec, "side": side}) for side, actor in sides.items()}
    ended, _ = ray.wait(list(results.values()), num_returns=1, timeout=LIMIT)
    if not ended:
        raise TimeoutError(f"not done after {LIMIT:.0f} s")
    ray.get(ended)  # raises what ended it
    turns, _ = ray.get(list(results.values()), timeout=WAIT)
    for actor in sides.values():
        ray.kill(actor)
    return turns


def plain(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Turns of both sides as processes that know the address of Ray and the folder, each in a session of its own."""
    children = {}
    try:
        for side in "AB":
            command = [sys.executable, __file__, "--child", json.dumps({**spec, "side": side})]
            output, errors = (open(Path(spec["folder"], f"{side}-{kind}"), "w+") for kind in ("out", "err"))  # noqa: SIM115
            children[side] = subprocess.Popen(command, stdout=output, stderr=errors, start_new_session=True)
        until = time.monotonic() + LIMIT
        while any(child.poll() is None for child in children.values()):
            if any(child.poll() for child in children.values()) or time.monotonic() > until:
                break
            time.sleep(0.1)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    bad = [side for side, child in children.items() if child.returncode]
    if bad:
        said = [Path(spec["folder"], f"{side}-err").read_text()[-2000:] for side in bad]
        raise RuntimeError(f"{' and '.join(bad)} failed, or took over {LIMIT:.0f} s:\n" + "\n".join(said))
    return json.loads(Path(spec["folder"], "A-out").read_text().splitlines()[-1])


@contextlib.contextmanager
def cluster(memory: int) -> Iterator[dict[str, Any]]:
    """Ray on this machine alone, with a mailbox; everything is gone afterwards. Yields what both sides need."""
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
    import ray  # which reads the environment

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        try:
            begun = time.perf_counter()
            store = {"object_store_memory": memory, "num_cpus": 2, "num_gpus": 0}
            context: Any = ray.init(include_dashboard=False, _temp_dir=folder, **store, **QUIET)
            started = time.perf_counter() - begun
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that Ray is shut down
            mailbox = ray.remote(num_cpus=0, name=MAILBOX)(Mailbox).remote()
            ray.get(mailbox.__ray_ready__.remote(), timeout=WAIT)
            yield {"folder": folder, "address": context.address_info["gcs_address"], "started": started}
        finally:
            ray.shutdown()
            _end(10.0)


def _end(seconds: float) -> None:
    """Waits for all processes that descend from this one, then kills them."""
    until = time.monotonic() + seconds
    while (left := _descendants(os.getpid())) and time.monotonic() < until:
        time.sleep(0.1)
    for process in left:
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)


def rows_of(processes: str, turns: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Figures for each size and way."""
    for size, way in product(dict.fromkeys(turn["MB"] for turn in turns), WAYS):
        own = [turn for turn in turns if (turn["MB"], turn["way"]) == (size, way)]
        seconds = common.spread([turn["seconds"] for turn in own])
        cpu = {part: statistics.median(turn["cpu"][part] for turn in own) / (size / 1e3) for part in ("A", "B", "Ray")}
        total = statistics.median(sum(turn["cpu"].values()) for turn in own) / (size / 1e3)
        marks = {key: statistics.median(turn[key] for turn in own) for key in ("put", "place")}
        yield {
            "processes": processes,
            "MB": size,
            "way": way,
            "seconds": seconds,
            "fastest": min(turn["seconds"] for turn in own),
            "GB/s": size / 1e3 / seconds["median"],
            "cpu s/GB": total,
            "cpu s/GB of": cpu,
            "aliased": all(turn["aliased"] for turn in own),
            **(marks if way != "transfer" else dict.fromkeys(marks)),
        }


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of the printed table."""
    parts = {f"{key} {part}": value for key in ("seconds", "cpu s/GB of") for part, value in row[key].items()}
    columns = ("processes", "MB", "way", "GB/s", "cpu s/GB", "put", "place", "aliased")
    return {key: row[key] for key in columns} | parts


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 64, 512], help="MB")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sockets", type=int, default=1, help="of a transfer server, for the data")
    parser.add_argument("--child", type=json.loads, help="a plain process")
    args = parser.parse_args()
    if args.child:
        exit_with_parent(args.child["main"])
        import ray

        ray.init(address=args.child["address"], **QUIET)
        print(json.dumps(run_side(args.child)))
        return
    if args.quick:
        args.sizes, args.repeats = [1], 2
    about, rows = common.machine("ray"), []
    print(common.title(about))
    with cluster(max(256, 4 * max(args.sizes)) * 10**6) as spec:
        spec |= {"main": os.getpid(), "sizes": args.sizes, "repeats": args.repeats, "sockets": args.sockets}
        for kind in (plain, actors):
            rows += rows_of(kind.__name__, kind({**spec, "socket": kind.__name__}))
    print(common.table([_shown(row) for row in rows]))
    print(f"Ray started in {spec['started']:.1f} s")
    common.report("islands_transport", args, rows, about, ray_start_seconds=spec["started"])


if __name__ == "__main__":
    main()
