"""Reading and writing of arrays with orbax's v1 API. No other module imports orbax."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.futures import future, synchronization
from orbax.checkpoint._src.metadata import array_metadata_store

from jaxtrain.checkpoint.files import DATA_FILE, failure_reason
from jaxtrain.errors import CheckpointError

NAME = "state"  # folder of the state in a step
_CHUNK = 64 << 20  # bytes of a stored chunk: bounds what a restore onto another mesh reads without need
_READ = 64 << 20  # bytes in flight while restoring
_WRITE = 64 << 20  # bytes in flight while saving, in addition to the arrays
# Coroutines that would have written a save, if its folder had been created.
_NEVER_AWAITED = r"coroutine '(OrbaxLayout\.|\w*CheckpointHandler\.|\w*TypeHandler\.|_serialize_).* was never awaited"
_HANDLER = ocp.handlers.PyTreeHandler


def _context(
    timeout: float, *, read_bytes: int | None = None, write_bytes: int | None = None, partial: bool = False
) -> ocp.Context:
    """Returns the options: OCDBT and zarr3, uncompressed, because weights compress by 7% at half the speed."""
    context = ocp.Context()
    context.array.saving.use_ocdbt = True
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False  # a restore gives its own shardings
    context.array.saving.storage_options.chunk_byte_size = _CHUNK
    context.asynchronous.timeout_secs = ceil(timeout)
    # A save creates its folder first. Else writers whose folder cannot be created wait for it, and hold up the exit of
    # the process; and with several processes orbax drops the signals that the others wait for.
    context.asynchronous.create_directories_asynchronously = False
    context.memory.read_concurrent_bytes = read_bytes
    context.memory.write_concurrent_bytes = write_bytes
    context.pytree.loading.partial_load = partial
    return context


def write(path: Path, tree: dict[str, Any], timeout: float) -> None:
    """Writes a nested dict of arrays; returns when it is on disk under its final name. One process, any thread."""
    future.AwaitableSignalsContract.remove_all_awaitable_signals()  # those of the last save, which is over
    with _context(timeout, write_bytes=_write_limit(tree)):
        ocp.save(str(path), tree, checkpointable_name=NAME)


@dataclass(frozen=True)
class PartialSave:
    """Part of a save that this process writes in the background.

    Attributes:
      folder: folder of the step's files while orbax writes them; process 0 renames it once all parts are there.
      result: waits until the part is written; on process 0 until all parts are merged under the final name.
    """

    folder: Path
    result: Callable[[], None]


def start(path: Path, tree: dict[str, Any], timeout: float, await_others: Callable[[], None]) -> PartialSave:
    """Copies a nested dict of arrays to the host, then writes it in the background. `path` must not exist.

    All processes call it on their main threads, and each writes the shards it holds. Orbax's own barriers, in which
    the others wait up to 300 s if one process fails, are off: to orbax each process is the only active one.

    Args:
      path: folder of the step.
      tree: the arrays.
      timeout: seconds for this process's part.
      await_others: called on process 0 before it merges the parts; blocks until all are written, raises if one failed.
    """
    index = jax.process_index()
    if index == 0:
        future.AwaitableSignalsContract.remove_all_awaitable_signals()  # those of the last save, which is over
    handler, folders = _part_handler(await_others)
    context = _context(timeout, write_bytes=_write_limit(tree))
    context.multiprocessing.active_processes = {index}
    context.file.skip_sync_file_validations = True
    context.array.saving.array_metadata_store = _SharedMetadataStore()
    registry = ocp.handlers.local_registry(include_global_registry=False)
    context.checkpointables.registry = registry.add(handler, checkpointable_name=NAME)
    try:
        with context:
            response = ocp.save_async(str(path), tree, checkpointable_name=NAME)
    except Exception:
        if index == 0:
            _release_others()
        raise
    return PartialSave(folders[0], response.result)


def files_of_process(folder: Path, process: int) -> list[str]:
    """Returns the relative names of the files of a step that a process above 0 wrote. Lists no folder of all processes.

    Of a thousand processes on a network file system, each would list a thousand entries.
    """
    found = [f"{NAME}/array_metadatas/process_{process}", DATA_FILE.format(process)]
    for root, _, names in os.walk(folder / NAME / f"ocdbt.process_{process}"):
        found += [os.path.relpath(os.path.join(root, name), folder) for name in names]
    return sorted(name for name in found if (folder / name).exists())


def written_by_another(name: str) -> bool:
    """Returns whether a process above 0 wrote a file of a step, by its relative name: see `files_of_process`."""
    own = rf"({NAME}/(ocdbt\.process_[1-9]\d*/|array_metadatas/process_[1-9])|data/process_[1-9])"
    return re.match(own, name) is not None


def _part_handler(await_others: Callable[[], None]) -> tuple[type[_HANDLER], list[Path]]:
    """Returns a form of orbax's handler of trees that merges when all parts are written; and the folders it writes."""
    folders = []

    class PartHandler(_HANDLER):  # pyright: ignore[reportGeneralTypeIssues]
        async def save(self, directory: Any, checkpointable: Any) -> Awaitable[None]:
            folders.append(Path(directory.path).parent)
            if jax.process_index() > 0:
                return await super().save(directory, checkpointable)
            complete: Any = _CompleteFolder(directory, await_others)
            part: Any = await super().save(complete, checkpointable)
            complete.own_writes = part.commit_futures
            return part

    # Orbax writes this name into the checkpoint, and its readers look the handler up by it.
    PartHandler.__module__, PartHandler.__qualname__ = _HANDLER.__module__, _HANDLER.__qualname__
    return PartHandler, folders


def _release_others() -> None:
    """Lets the other processes write although process 0 failed to create the folder that they wait for, up to 300 s."""
    names = synchronization.HandlerAwaitableSignal
    signals = [names.STEP_DIRECTORY_CREATION, names.ITEM_DIRECTORY_CREATION]
    future.set_signals(signals, operation_id=synchronization.OperationIdGenerator.get_current_operation_id())


class _SharedMetadataStore(array_metadata_store.Store):
    """Store of the arrays' metadata whose folder any process creates: others would wait for process 0 up to 600 s."""

    def set_primary_host(self, primary_host: int | None) -> None:
        super().set_primary_host(None)


class _CompleteFolder:
    """Folder of an item of a checkpoint that counts as created when no process writes to it any more."""

    def __init__(self, folder: Any, await_others: Callable[[], None]) -> None:
        self._folder, self._await_others = folder, await_others
        self.own_writes: list[Any] = []

    @property
    def path(self) -> Any:
        return self._folder.path

    async def await_creation(self) -> Any:
        path = await self._folder.await_creation()
        waits = (asyncio.to_thread(write.result) for write in self.own_writes)
        await asyncio.gather(*waits, return_exceptions=True)  # orbax itself meets the errors later
        await asyncio.to_thread(self._await_others)
        return path


def _write_limit(tree: dict[str, Any]) -> int:
    """Returns the limit on bytes in flight while saving; more than the largest shard, or orbax refuses to write it.

    Shards above `_CHUNK` are copied into chunks; without a limit the chunks of all shards wait in memory together,
    which is 0.6 to 1.0 of the state.
    """
    arrays = jax.tree.leaves(tree)
    return max([_WRITE, *(shard.data.nbytes + 1 for array in arrays for shard in array.addressable_shards)])


def read(path: Path, abstract: dict[str, Any], partial: bool) -> dict[str, Any]:
    """Reads arrays into the shardings of a nested dict of ShapeDtypeStructs; `partial` ignores other stored arrays."""
    with _context(300, read_bytes=_read_limit(jax.tree.leaves(abstract)), partial=partial):
        return ocp.load(str(path), abstract, checkpointable_name=NAME)


def stored_arrays(path: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns `a/b/c` -> shape and dtype of the arrays in any folder that orbax wrote.

    Raises:
        CheckpointError: not such a folder.
    """
    try:
        leaves = _leaves(ocp.metadata(path).metadata)
    except Exception as error:
        raise CheckpointError(f"{path} is no checkpoint of orbax: {failure_reason(error)}") from error
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in leaves.items() if _is_array(leaf)}


def read_arrays(path: str, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads some arrays of such a folder, each in its dtype and sharding; the others are not read."""
    stored = ocp.metadata(path).metadata
    leaves = [wanted.get(name, ocp.PLACEHOLDER) for name in _leaves(stored)]
    abstract = jax.tree.unflatten(jax.tree.structure(stored, is_leaf=_is_array), leaves)
    with _context(300, read_bytes=_read_limit(list(wanted.values()))):
        found = _leaves(ocp.load(path, abstract))
    return {name: found[name] for name in wanted}


def _leaves(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_array)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _read_limit(leaves: list[Any]) -> int:
    """Returns the limit on bytes in flight while reading. Orbax refuses a single read above it instead of waiting."""
    return max(_READ, *(2 * prod(leaf.shape) * np.dtype(leaf.dtype).itemsize + 1 for leaf in leaves), 0)


def hide_failed_writes() -> None:
    """Hides tracebacks of single writes of orbax, in this process. Others are printed as before.

    A failed save is reported once, with one reason. Orbax gives up at the first write that fails and closes its event
    loop; each of its other writes, hundreds of them, then prints a traceback, which hides that report.
    """
    for name in ("asyncio", "absl"):
        logging.getLogger(name).addFilter(_is_no_failed_write)  # adds it once
    if not isinstance(sys.unraisablehook, _UnraisableHook):
        sys.unraisablehook = _UnraisableHook(sys.unraisablehook)
    warnings.filterwarnings("ignore", _NEVER_AWAITED, RuntimeWarning)  # they have the name, not the module


def _is_no_failed_write(record: logging.LogRecord) -> bool:
    """Returns False for errors that orbax, or a task or future of it that nobody awaits any more, has logged."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None or record.levelno < logging.ERROR:
        return True
    frames = traceback.extract_tb(error.__traceback__)
    is_of_orbax = "/orbax/" in record.pathname or any("/orbax/" in frame.filename for frame in frames)
    return not (is_of_orbax or "in OCDBT database" in str(error))


class _UnraisableHook:
    """Hook for exceptions that have no caller: passes all but those of writes whose event loop is closed."""

    def __init__(self, previous: Callable[[Any], object]) -> None:
        self._previous = previous

    def __call__(self, unraisable: Any) -> None:
        # TensorStore calls back into the loop from a thread of C++, which has no frame before asyncio's.
        frames = traceback.extract_tb(unraisable.exc_traceback)
        is_late = unraisable.exc_type is RuntimeError and str(unraisable.exc_value) == "Event loop is closed"
        if not (is_late and all("/asyncio/" in frame.filename for frame in frames)):
            self._previous(unraisable)
