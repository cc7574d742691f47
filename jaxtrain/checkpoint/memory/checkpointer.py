"""A worker's side of the nodes' memory: its shards go there after a step, and a whole step comes back from there."""

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

from jaxtrain.checkpoint.memory.client import Address, Client, Nodes
from jaxtrain.checkpoint.memory.format import Header, Key, Piece, Tensors, covered
from jaxtrain.checkpoint.snapshot import mismatch, named, named_arrays, nest, on_host, rematerialise, tensors, unnest
from jaxtrain.distributed.agreement import agreed, first_text
from jaxtrain.errors import PeerMemoryError

COPIES = 2  # of each part, on as many nodes where there are so many

Box = tuple[slice, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class ReplicatedStep:
    """A step that is whole in the nodes' memory.

    Attributes:
        step: of it.
        manifest: what a resumed run needs to know, as in a checkpoint.
        where: process -> who holds its part.
        headers: process -> of its part.
        generation: that left it.
    """

    step: int
    generation: int
    manifest: dict[str, Any]
    where: dict[int, list[Address]]
    headers: dict[int, Header]


class Keeper:
    """Copies of the state in the memory of this node and another, made while the next steps run.

    Args:
        nodes: where they are.
        report: takes a line that says what went wrong; called by the main thread.
    """

    def __init__(self, nodes: Nodes, report: Callable[[str], None]) -> None:
        self.every, self._nodes, self._report = nodes.every, nodes, report
        self._taken: threading.Thread | None = None  # has a copy that is not to be found yet
        self._thread: threading.Thread | None = None
        self._problem: str | None = None
        self._is_told = False

    def keep(self, step: int, state: Any, manifest: Mapping[str, Any]) -> None:
        """Takes a copy, which `share` gives away; the state may be donated to the next step as soon as this returns.

        Waits for the copy before, so that a process that fails has lost one copied step at most. What goes wrong is
        reported once, and again after a copy that went well.
        """
        self.wait()
        flat = named_arrays(state)
        shards = [
            (name, shard) for name, array in flat.items() for shard in array.addressable_shards if shard.replica_id == 0
        ]
        targets = [on_host(SingleDeviceSharding(shard.device)) for _, shard in shards]
        copies = jax.device_put([shard.data for _, shard in shards], targets, may_alias=False)
        boxes = [(name, shard.index, copy) for (name, shard), copy in zip(shards, copies)]
        key = Key(self._nodes.generation, step, jax.process_index())
        arguments = (key, boxes, tensors(state), dict(manifest))
        self._taken = threading.Thread(target=self._copy, args=arguments, name=f"peers-{step}", daemon=True)

    def share(self) -> None:
        """Begins to give away the copy that was taken last, if that has not begun.

        To be called when nothing of its step is left to do: whoever goes on from it begins the next one.
        """
        if self._taken is not None:
            self._thread, self._taken = self._taken, None
            self._thread.start()

    def wait(self) -> None:
        """Blocks until no copy is in flight."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._problem and not self._is_told:
            self._report(f"the state of the last step is not in the memory of two nodes: {self._problem}")
        self._is_told = self._problem is not None

    def forget(self, after: int) -> None:
        """Training goes on from step `after`: what was kept of later ones is not to be used."""
        self._taken = None
        self.wait()
        for address in self._nodes.stocks:
            try:
                with Client(address, self._nodes.token) as client:
                    client.forget(after)
            except PeerMemoryError as error:
                self._report(str(error))

    def newest(self, after: int) -> ReplicatedStep | None:
        """The newest step that is whole and later than `after`; None where none is. The same on every process."""
        step, generation = self._newest(after) if jax.process_index() == 0 else (-1, -1)
        step, generation = agreed(step), agreed(generation)
        if step < 0:
            return None
        return self._on_all(step, lambda: self._find(step, generation))

    def restore(self, found: ReplicatedStep, abstract: Any) -> Any | None:
        """A state straight into the target shardings, on any mesh; None where it cannot be had or does not fit.

        Args:
            found: by `newest`.
            abstract: pytree of jax.ShapeDtypeStruct with shardings.
        """
        return self._on_all(found.step, lambda: self._restored(found, abstract))

    def _on_all(self, step: int, work: Callable[[], T]) -> T | None:
        """Returns the result of `work`, or None with a log line on every process if it fails on any."""
        result, problem = None, None
        try:
            result = work()
        except PeerMemoryError as error:
            problem = str(error)
        if problem := first_text(problem):
            self._report(f"step {step} in the memory of the nodes cannot be used: {problem}")
            return None
        return result

    def _copy(self, key: Key, boxes: list[tuple[str, Box, jax.Array]], shapes: Tensors, manifest: dict) -> None:
        """The thread of one step's copy."""
        try:
            pieces, data, offset = [], [], 0
            for name, box, copy in boxes:
                view = _bytes(np.asarray(copy))
                start = tuple(dim.start or 0 for dim in box)
                pieces.append(Piece(name, start, copy.shape, offset, len(view), xxhash.xxh3_64_hexdigest(view)))
                data.append(view)
                offset += len(view)
            header = Header(jax.process_count(), offset, shapes, tuple(pieces), manifest)
            problems = [self._put(address, key, header, data) for address in self._nodes.stocks[:COPIES]]
            self._problem = next((problem for problem in problems if problem), None)
        except Exception as error:  # a copy that fails is no reason to end training
            self._problem = f"{type(error).__name__}: {error}"

    def _put(self, address: Address, key: Key, header: Header, data: list[memoryview]) -> str | None:
        try:
            with Client(address, self._nodes.token) as client:
                client.put(key, header, data)
        except PeerMemoryError as error:
            return str(error)
        return None

    def _listed(self) -> dict[Key, tuple[int, list[Address]]]:
        """Part -> processes of its step, and who holds it; nodes that are gone hold nothing."""
        parts: dict[Key, tuple[int, list[Address]]] = {}
        for address in self._nodes.stocks:
            try:
                with Client(address, self._nodes.token) as client:
                    for key, processes in client.parts():
                        parts.setdefault(key, (processes, []))[1].append(address)
            except PeerMemoryError as error:
                self._report(str(error))
        return parts

    def _newest(self, after: int) -> tuple[int, int]:
        """(step, generation) of the newest whole step; -1 for none."""
        parts = self._listed()
        whole = {
            (key.step, key.generation)
            for key, (processes, _) in parts.items()
            if all(key._replace(process=process) in parts for process in range(processes))
        }
        return max((found for found in whole if found[0] > after), default=(-1, -1))

    def _find(self, step: int, generation: int) -> ReplicatedStep:
        """Locates the parts of a step and reads their headers."""
        listed = self._listed()
        where = {key.process: held for key, (_, held) in listed.items() if key[:2] == (generation, step)}
        headers = {}
        for process, holders in where.items():
            with Client(holders[0], self._nodes.token) as client:
                headers[process] = client.header(Key(generation, step, process))
        if 0 not in headers or len(headers) != headers[0].processes:
            raise PeerMemoryError("it is not whole any more")
        if any(header.tensors != headers[0].tensors for header in headers.values()):
            raise PeerMemoryError("its parts are of different models")
        return ReplicatedStep(step, generation, headers[0].manifest, where, headers)

    def _restored(self, found: ReplicatedStep, abstract: Any) -> Any:
        wanted = named(abstract)
        if difference := mismatch(found.headers[0].tensors, tensors(abstract)):
            raise PeerMemoryError(f"it does not fit this model: {difference}")
        held: dict[str, list[tuple[int, Piece]]] = {name: [] for name in wanted}
        for process, header in found.headers.items():
            for piece in header.pieces:
                held[piece.name].append((process, piece))
        flat = {}
        with ExitStack() as stack:
            reader = _TensorReader(found, self._nodes.token, stack)
            for name, leaf in wanted.items():
                if not covered([piece for _, piece in held[name]], leaf.shape):
                    raise PeerMemoryError(f"it does not have all of {name}")
                one = {name: reader.array(leaf, held[name])}
                rematerialise(one)
                flat |= one
        return unnest(nest(flat), abstract)


class _TensorReader:
    """Reads tensors of a found step, a connection to each node open until the end."""

    def __init__(self, found: ReplicatedStep, token: str, stack: ExitStack) -> None:
        self._found, self._token, self._stack = found, token, stack
        self._clients: dict[Address, Client] = {}

    def array(self, leaf: Any, held: list[tuple[int, Piece]]) -> jax.Array:
        """A tensor in its sharding; each process reads the pieces that its devices need, once."""
        pieces: dict[int, np.ndarray] = {}
        boxes: dict[tuple, np.ndarray] = {}

        def part(box: Any) -> np.ndarray:
            bounds = tuple(dim.indices(size)[:2] for dim, size in zip(box, leaf.shape))
            if bounds not in boxes:
                boxes[bounds] = self._box(bounds, leaf.dtype, held, pieces)
            return boxes[bounds]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, part, dtype=leaf.dtype)

    def _box(self, bounds: tuple, dtype: Any, held: list[tuple[int, Piece]], pieces: dict[int, np.ndarray]) -> Any:
        """The values within [first, last) of each dim."""
        box = np.empty([last - first for first, last in bounds], dtype)
        for index, (process, piece) in enumerate(held):
            ends = [start + size for start, size in zip(piece.start, piece.shape)]
            overlap = [
                (max(first, start), min(last, end)) for (first, last), start, end in zip(bounds, piece.start, ends)
            ]
            if any(first >= last for first, last in overlap):
                continue
            if index not in pieces:
                pieces[index] = self._piece(process, piece, dtype)
            here = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(overlap, bounds))
            there = tuple(slice(a - start, b - start) for (a, b), start in zip(overlap, piece.start))
            box[here] = pieces[index][there]
        return box

    def _piece(self, process: int, piece: Piece, dtype: Any) -> np.ndarray:
        """Reads a piece from the first node that has it undamaged."""
        if piece.size != prod(piece.shape) * np.dtype(dtype).itemsize:
            raise PeerMemoryError(f"a piece of {piece.name} has {piece.size} bytes")
        key, problem = Key(self._found.generation, self._found.step, process), ""
        for address in self._found.where[process]:
            try:
                data = self._client(address).read(key, piece.offset, piece.size)
            except PeerMemoryError as error:
                problem = str(error)
                continue
            if xxhash.xxh3_64_hexdigest(data) == piece.digest:
                return np.frombuffer(data, dtype).reshape(piece.shape)
            problem = f"a piece of {piece.name} has another checksum than when it was written"
        raise PeerMemoryError(problem)

    def _client(self, address: Address) -> Client:
        if address not in self._clients:
            self._clients[address] = self._stack.enter_context(Client(address, self._token))
        return self._clients[address]


def _bytes(array: np.ndarray) -> memoryview:
    """The bytes of an array of any dtype."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
