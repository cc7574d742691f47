"""Building of token caches: in parallel, atomic and resumable.

The shards of a source are a pure function of its content and each is written atomically, so the bytes of a complete
cache depend neither on the number of processes nor on how often they were killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.megatron import open_megatron
from jaxtrain.data.sources import SPLITS, File, Progress, list_files, plan_shards
from jaxtrain.data.token_cache.content_hash import hash_files
from jaxtrain.data.token_cache.store import VERSION, TokenCache, finish_cache, open_cache, read_marker, shard_path
from jaxtrain.data.token_cache.worker import CacheJob, CacheShard, write_shard
from jaxtrain.data.token_files import TokenSource, hash_file
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError
from jaxtrain.io.system import available_cores

SERIAL_BYTES = 4 << 20  # input that this process tokenizes itself, because starting workers would take longer
MIN_SHARD_BYTES, MAX_SHARD_BYTES = 4 << 20, 1 << 30  # of input
SHARDS = 256  # per source, within these bounds


def build_cache(
    source: SourceConfig,
    tokenizer: str,
    validation: float,
    root: str | Path,
    workers: int | None = None,
    progress: Progress | None = None,
    *,
    check: bool = False,
    shard_bytes: int | None = None,
) -> TokenSource:
    """Opens the token cache of a source after building the missing parts. Files of tokens are opened in place.

    Args:
      source: the documents.
      tokenizer: `bytes` or the path of a tokenizer.json.
      validation: share of documents in the validation split.
      root: folder of all caches. This one is `root/tokens/NAME-KEY`, where KEY is a hash of the content of the files,
        the tokenizer and everything else that its bytes depend on.
      workers: processes; by default the cores that this process may use.
      progress: called with (bytes done, bytes in all), first with what an earlier build has done.
      check: read a complete cache and rewrite damaged shards.
      shard_bytes: input per shard; by default about 256 shards of 4 MiB to 1 GiB.

    Raises:
      DataError: bad input, a dead worker, no space.
    """
    encoder = load_tokenizer(tokenizer)
    root = Path(root).expanduser()
    files = list_files(source, root, progress)
    name = "".join(c if c.isalnum() else "_" for c in Path(source.path).name)[:40]
    source_id = hashlib.sha256(repr((os.path.abspath(source.path), source)).encode()).hexdigest()[:16]
    try:
        hashes = hash_files(files, root / "hashes" / f"{source_id}.json")
        target = shard_bytes or min(max(sum(f.size for f in files) // SHARDS, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
        key = _cache_key(source, files, [h for h, _ in hashes], encoder, validation, target)
        folder = root / "tokens" / f"{name}-{encoder.name}-{key[:16]}"
        if not check and (cache := _open_complete(folder)):
            return cache
        folder.mkdir(parents=True, exist_ok=True)
        if any(f.format == "megatron" for f in files):
            with _lock(folder):
                return open_megatron(folder, key, files, encoder, validation, progress, check)
        job = CacheJob(str(folder), key, tokenizer, encoder.fingerprint, source.field, validation)
        states = {f.path: state for f, (_, state) in zip(files, hashes)}
        with _lock(folder) as is_locked:
            if is_locked:
                for temporary in folder.glob("*.tmp"):  # of killed builds
                    temporary.unlink(missing_ok=True)
            if check or not _open_complete(folder):  # another process may have finished it meanwhile
                shards = [
                    CacheShard(i, tuple(spans), {s.file.path: states[s.file.path] for s in spans})
                    for i, spans in enumerate(plan_shards(files, target))
                ]
                _write_shards(job, shards, encoder, workers, progress)
    except OSError as error:
        where = error.filename or root
        raise DataError(f"{where}: {error.strerror}; is data.cache_dir writable, with space left?") from error
    return open_cache(folder)


def _open_complete(folder: Path) -> TokenCache | None:
    """Opens the cache in a folder; None if it is incomplete or lacks the bytes of its text.

    Caches did not always have these. Their tokens and their key are the same, so the build rewrites them in place.
    """
    if not (folder / "cache.json").exists():
        return None
    cache = open_cache(folder)
    return None if cache.train.text_bytes is None else cache


def _cache_key(
    source: SourceConfig, files: list[File], hashes: list[str], encoder: Tokenizer, validation: float, target: int
) -> str:
    """Hashes everything that the bytes of the cache depend on."""
    contents = [[f.name, f.format, h] for f, h in zip(files, hashes)]
    inputs = [VERSION, source.field, encoder.fingerprint, encoder.vocab, encoder.eos, validation, target, contents]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Holds the lock of a cache folder, which the kernel releases if this process dies.

    Yields:
      Whether the folder is locked. Windows and some network file systems have no locks. Several builders then write
      the same bytes to different temporary files, which is slow but harmless.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(folder / ".lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            is_locked = False
        yield is_locked


def _write_shards(
    job: CacheJob, shards: list[CacheShard], encoder: Tokenizer, workers: int | None, progress: Progress | None
) -> None:
    """Writes the missing and damaged shards of a cache, then its description."""
    folder = Path(job.folder)
    todo = [shard for shard in shards if not _is_intact(folder, shard.number, job.key)]
    size, total = sum(shard.size for shard in todo), sum(shard.size for shard in shards)
    done = total - size

    def report(shard: CacheShard | None) -> None:
        nonlocal done
        done += shard.size if shard else 0
        if progress:
            progress(done, total)

    report(None)
    count = min(workers or available_cores(), len(todo))
    if count <= 1 or size <= SERIAL_BYTES * (16 if job.tokenizer == "bytes" else 1):
        for shard in todo:
            write_shard(job, shard, encoder)
            report(shard)
    else:
        _run_workers(job, todo, count, report)
    finish_cache(folder, job.key, len(shards), encoder)


def _is_intact(folder: Path, number: int, key: str) -> bool:
    """Returns whether a shard is finished and its files have the right hashes."""
    marker = read_marker(folder, number, key)
    if marker is None or "text_bytes" not in marker[SPLITS[0]]:
        return False
    hashes = {folder / f"{number:05d}.count": marker["count"]}
    for split in SPLITS:
        hashes |= {shard_path(folder, split, number, kind): marker[split][kind] for kind in ("bin", "len")}
    return all(path.exists() and hash_file(path) == expected for path, expected in hashes.items())


def _run_workers(job: CacheJob, shards: list[CacheShard], count: int, report: Callable[[CacheShard], None]) -> None:
    """Writes shards in `count` worker processes, the largest first."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    env = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "jaxtrain.data.token_cache.worker", json.dumps(asdict(job))]
    pipe = subprocess.PIPE
    processes = [  # in new sessions, because Ctrl-C is for this process, which ends them
        subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True, start_new_session=True)
        for _ in range(count)
    ]
    idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
    for process in processes:
        idle.put(process)

    def write(shard: CacheShard) -> CacheShard:
        process = idle.get()
        try:
            _write_in_worker(process, shard)
        finally:
            idle.put(process)
        return shard

    pool = ThreadPoolExecutor(count)
    try:
        for future in as_completed([pool.submit(write, s) for s in sorted(shards, key=lambda s: -s.size)]):
            report(future.result())
    finally:
        for process in processes:
            process.kill()
        pool.shutdown(cancel_futures=True)
        for process in processes:
            process.communicate()  # closes its streams


def _write_in_worker(process: subprocess.Popen[str], shard: CacheShard) -> None:
    """Sends a shard to a worker and waits for the answer. Raises DataError if it failed or died."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(json.dumps(shard), file=process.stdin, flush=True)
        error = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        reason = f"the tokenizing process died (exit code {process.wait()}); fewer data.workers need less memory"
        raise DataError(f"{shard.spans[0].file.path}: {reason}") from None
    if error is not None:
        raise DataError(error)
