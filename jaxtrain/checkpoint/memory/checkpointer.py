"""In-memory checkpoints of a worker: takes snapshots of its shards, and restores the newest complete step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import jax
import numpy as np
import xxhash
from jax.sharding import SingleDeviceSharding

from jaxtrain.checkpoint import state_tree
from jaxtrain.checkpoint.files import TensorSpecs
from jaxtrain.checkpoint.memory.client import Address, PeerConfig, SnapshotClient
from jaxtrain.checkpoint.memory.protocol import Piece, SnapshotHeader, SnapshotKey
from jaxtrain.distributed.multihost import broadcast, first_message
from jaxtrain.errors import PeerMemoryError

COPIES = 2  # of each snapshot, on different nodes

Box = tuple[slice, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class ReplicatedStep:
    """A step whose snapshots are all in the memory of the nodes.

    Attributes:
        step: its number.
        generation: generation of the launch that made it.
        manifest: manifest as in a checkpoint.
        holders: process -> servers that have its snapshot.
        headers: process -> header of its snapshot.
    """

    step: int
    generation: int
    manifest: dict[str, Any]
    holders: dict[int, list[Address]]
    headers: dict[int, SnapshotHeader]


class MemoryCheckpointer:
    """Writes the state to the memory of this node and another while the next steps run, and restores it from there.

    Args:
        config: addresses of the snapshot servers.
        report: receives problems as one-line texts; called in the main thread.
    """

    def __init__(self, config: PeerConfig, report: Callable[[str], None]) -> None:
        self.every, self._config, self._report = config.every, config, report
        self._pending: threading.Thread | None = None  # sends the last snapshot, not started yet
        self._sending: threading.Thread | None = None
        self._problem: str | None = None
        self._is_reported = False

    def snapshot(self, step: int, state: Any, manifest: Mapping[str, Any]) -> None:
        """Copies this process's shards, for `replicate` to send; the state may be donated once this returns.

        Waits for the previous snapshot to be sent, so that a process that fails has lost at most one. A problem is
        reported once, and again after a snapshot that was sent.
        """
        self.wait()
        shards = [
            (name, shard)
            for name, array in state_tree.flatten_arrays(state).items()
            for shard in array.addressable_shards
            if shard.replica_id == 0
        ]
        targets = [state_tree.host_sharding(SingleDeviceSharding(shard.device)) for _, shard in shards]
        copies = jax.device_put([shard.data for _, shard in shards], targets, may_alias=False)
        boxes = [(name, shard.index, copy) for (name, shard), copy in zip(shards, copies)]
        key = SnapshotKey(self._config.generation, step, jax.process_index())
        arguments = (key, boxes, state_tree.tensor_specs(state), dict(manifest))
        self._pending = threading.Thread(target=self._send, args=arguments, name=f"snapshot-{step}", daemon=True)

    def replicate(self) -> None:
        """Starts to send the last snapshot, unless that has started.

        To be called when its step is finished and logged: a run that resumes from it starts with the next step.
        """
        if self._pending is not None:
            self._sending, self._pending = self._pending, None
            self._sending.start()

    def wait(self) -> None:
        """Blocks until no snapshot is being sent."""
        if self._sending is None:
            return
        self._sending.join()
        self._sending = None
        if self._problem and not self._is_reported:
            self._report(f"the state of the last step is not in the memory of two nodes: {self._problem}")
        self._is_reported = self._problem is not None

    def discard_after(self, step: int) -> None:
        """Deletes the snapshots of later steps, because training continues from `step`."""
        self._pending = None
        self.wait()
        for address in self._config.servers:
            try:
                with self._connect(address) as client:
                    client.discard_after(step)
            except PeerMemoryError as error:
                self._report(str(error))

    def newest(self, after: int) -> ReplicatedStep | None:
        """Returns the newest complete step later than `after`, or None. The same on every process."""
        step, generation = self._newest(after) if jax.process_index() == 0 else (-1, -1)
        step, generation = broadcast(step), broadcast(generation)
        if step < 0:
            return None
        return self._on_all(step, lambda: self._locate(step, generation))

    def restore(self, source: ReplicatedStep, abstract: Any) -> Any | None:
        """Reads a state into the target shardings, on any mesh; None if it cannot be read or does not fit.

        Args:
            source: result of `newest`.
            abstract: pytree of jax.ShapeDtypeStruct with shardings.
        """
        return self._on_all(source.step, lambda: self._read(source, abstract))

    def _connect(self, address: Address) -> SnapshotClient:
        return SnapshotClient(address, self._config.secret)

    def _on_all(self, step: int, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`, or None with a log line on every process if it fails on any."""
        result, problem = None, None
        try:
            result = work()
        except PeerMemoryError as error:
            problem = str(error)
        if problem := first_message(problem):
            self._report(f"step {step} in the memory of the nodes cannot be used: {problem}")
            return None
        return result

    def _send(
        self, key: SnapshotKey, boxes: list[tuple[str, Box, jax.Array]], tensors: TensorSpecs, manifest: dict
    ) -> None:
        """Body of the thread that sends one snapshot."""
        try:
            pieces, data, offset = [], [], 0
            for name, box, copy in boxes:
                view = np.ascontiguousarray(copy).reshape(-1).view(np.uint8).data
                start = tuple(dim.start or 0 for dim in box)
                pieces.append(Piece(name, start, copy.shape, offset, len(view), xxhash.xxh3_64_hexdigest(view)))
                data.append(view)
                offset += len(view)
            header = SnapshotHeader(jax.process_count(), offset, tensors, tuple(pieces), manifest)
            problems = []
            for address in self._config.servers[:COPIES]:
                try:
                    with self._connect(address) as client:
                        client.put(key, header, data)
                except PeerMemoryError as error:
                    problems.append(str(error))
            self._problem = problems[0] if problems else None
        except Exception as error:  # a failed copy is no reason to end training
            self._problem = f"{type(error).__name__}: {error}"

    def _list_snapshots(self) -> dict[SnapshotKey, tuple[int, list[Address]]]:
        """Returns key -> (number of processes of its step, servers that have it); reports unreachable servers."""
        snapshots: dict[SnapshotKey, tuple[int, list[Address]]] = {}
        for address in self._config.servers:
            try:
                with self._connect(address) as client:
                    for key, processes in client.snapshots():
                        snapshots.setdefault(key, (processes, []))[1].append(address)
            except PeerMemoryError as error:
                self._report(str(error))
        return snapshots

    def _newest(self, after: int) -> tuple[int, int]:
        """Returns (step, generation) of the newest complete step; (-1, -1) if there is none."""
        snapshots = self._list_snapshots()
        complete = {
            (key.step, key.generation)
            for key, (processes, _) in snapshots.items()
            if key.step > after and all(key._replace(process=process) in snapshots for process in range(processes))
        }
        return max(complete, default=(-1, -1))

    def _locate(self, step: int, generation: int) -> ReplicatedStep:
        """Finds the servers that have the snapshots of a step, and reads the headers."""
        snapshots = self._list_snapshots()
        holders = {key.process: servers for key, (_, servers) in snapshots.items() if key[:2] == (generation, step)}
        headers = {}
        for process, servers in holders.items():
            with self._connect(servers[0]) as client:
                headers[process] = client.header(SnapshotKey(generation, step, process))
        if 0 not in headers or len(headers) != headers[0].processes:
            raise PeerMemoryError("it is not complete any more")
        if any(header.tensors != headers[0].tensors for header in headers.values()):
            raise PeerMemoryError("its snapshots are of different models")
        return ReplicatedStep(step, generation, headers[0].manifest, holders, headers)

    def _read(self, source: ReplicatedStep, abstract: Any) -> Any:
        wanted = state_tree.flatten(abstract)
        if mismatch := state_tree.describe_mismatch(source.headers[0].tensors, state_tree.tensor_specs(abstract)):
            raise PeerMemoryError(f"it does not fit this model: {mismatch}")
        pieces: dict[str, list[tuple[int, Piece]]] = {name: [] for name in wanted}
        for process, header in source.headers.items():
            for piece in header.pieces:
                pieces[piece.name].append((process, piece))
        arrays = {}
        with ExitStack() as stack:
            reader = _TensorReader(source, lambda address: stack.enter_context(self._connect(address)))
            for name, leaf in wanted.items():
                if sum(prod(piece.shape) for _, piece in pieces[name]) != prod(leaf.shape):  # pieces do not overlap
                    raise PeerMemoryError(f"a part of {name} is missing")
                array = {name: reader.read(leaf, pieces[name])}
                state_tree.make_donatable(array)
                arrays |= array
        return state_tree.unflatten(arrays, abstract)


class _TensorReader:
    """Reads tensors of a replicated step; keeps one connection to each server.

    Args:
        source: the step.
        connect: opens a connection, which the caller closes.
    """

    def __init__(self, source: ReplicatedStep, connect: Callable[[Address], SnapshotClient]) -> None:
        self._source, self._connect = source, connect
        self._clients: dict[Address, SnapshotClient] = {}

    def read(self, leaf: Any, pieces: list[tuple[int, Piece]]) -> jax.Array:
        """Returns a tensor in the sharding of `leaf`; reads each piece that the local devices need once."""
        values: dict[int, np.ndarray] = {}
        boxes: dict[tuple, np.ndarray] = {}

        def box_of(index: Any) -> np.ndarray:
            bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index, leaf.shape))
            if bounds not in boxes:
                boxes[bounds] = self._box(bounds, leaf.dtype, pieces, values)
            return boxes[bounds]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, box_of, dtype=leaf.dtype)

    def _box(
        self, bounds: tuple, dtype: Any, pieces: list[tuple[int, Piece]], values: dict[int, np.ndarray]
    ) -> np.ndarray:
        """Returns the elements within [start, stop) of each dim. `values` caches pieces by their index."""
        box = np.empty([stop - start for start, stop in bounds], dtype)
        for index, (process, piece) in enumerate(pieces):
            overlap = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(bounds, piece.start, piece.shape)
            ]
            if any(start >= stop for start, stop in overlap):
                continue
            if index not in values:
                values[index] = self._fetch(process, piece, dtype)
            target = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(overlap, bounds))
            source = tuple(slice(a - offset, b - offset) for (a, b), offset in zip(overlap, piece.start))
            box[target] = values[index][source]
        return box

    def _fetch(self, process: int, piece: Piece, dtype: Any) -> np.ndarray:
        """Reads a piece from the first server that has it undamaged."""
        if piece.size != prod(piece.shape) * np.dtype(dtype).itemsize:
            raise PeerMemoryError(f"a piece of {piece.name} has {piece.size} bytes")
        key, problem = SnapshotKey(self._source.generation, self._source.step, process), ""
        for address in self._source.holders[process]:
            try:
                if address not in self._clients:
                    self._clients[address] = self._connect(address)
                data = self._clients[address].read(key, piece.offset, piece.size)
            except PeerMemoryError as error:
                problem = str(error)
                continue
            if xxhash.xxh3_64_hexdigest(data) == piece.digest:
                return np.frombuffer(data, dtype).reshape(piece.shape)
            problem = f"a piece of {piece.name} has another checksum than when it was written"
        raise PeerMemoryError(problem)
