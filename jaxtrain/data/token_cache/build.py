"""Building token caches: in parallel, atomically, resumably.

The shards of a source are a pure function of its content, and each is written whole or not at all, so that the bytes
of a finished cache do not depend on the number of processes or on how often they were killed.
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
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.megatron import open_megatron
from jaxtrain.data.sources import SPLITS, File, list_files, plan_shards
from jaxtrain.data.token_cache.content_hash import hash_files
from jaxtrain.data.token_cache.mapped_files import hash_tokens
from jaxtrain.data.token_cache.store import VERSION, TokenCache, finish, open_cache, read_marker, shard_file
from jaxtrain.data.token_cache.worker import Job, Shard, write_shard
from jaxtrain.data.token_runs import TokenSource
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError
from jaxtrain.io.system import available_cores

Progress = Callable[[int, int], None]  # (bytes of input done, in all)
SMALL = 4 << 20  # bytes of input that are tokenized in this process: starting another costs more
SHARD_BYTES = (4 << 20, 1 << 30)  # least and most input per shard
SHARDS = 256  # wanted, between those bounds


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
    """Open the cache of a source, building what is missing of it; files that hold tokens already are opened in place.

    Args:
      source: what to read.
      tokenizer: `bytes` or the path of a tokenizer.json.
      validation: share of documents in the validation split.
      root: folder of all caches; this one goes to `root/tokens/NAME-KEY`, its key being a hash of the content of the
        files, the tokenizer and whatever else its bytes depend on.
      workers: processes; default: the cores this process may use.
      progress: called with (bytes done, bytes in all), first with what an earlier build has left done.
      check: read a complete cache whole, and write its damaged shards anew.
      shard_bytes: input per shard; default: about 256 shards of 4 MiB to 1 GiB.

    Raises:
      DataError: bad input, a dead worker, no space.
    """
    encoder = load_tokenizer(tokenizer)
    root = Path(root).expanduser()
    files = list_files(source, root, progress)
    name = "".join(c if c.isalnum() else "_" for c in Path(source.path).name)[:40]
    described = repr((os.path.abspath(source.path), source))
    memory = root / "hashes" / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.json"
    try:
        hashes = hash_files(files, memory)
        target = shard_bytes or min(max(sum(f.size for f in files) // SHARDS, SHARD_BYTES[0]), SHARD_BYTES[1])
        key = _key(source, files, [h for h, _ in hashes], encoder, validation, target)
        folder = root / "tokens" / f"{name}-{encoder.name}-{key[:16]}"
        if not check and (found := _complete(folder)):
            return found
        folder.mkdir(parents=True, exist_ok=True)
        if any(f.format == "megatron" for f in files):
            with _locked(folder):
                return open_megatron(folder, key, files, encoder, validation, progress, check)
        job = Job(str(folder), key, tokenizer, encoder.fingerprint, source.field, validation)
        with _locked(folder) as alone:
            if alone:
                for litter in folder.glob("*.tmp"):  # of killed builds
                    litter.unlink(missing_ok=True)
            if check or not _complete(folder):  # another process may have finished it meanwhile
                states = {f.path: s for f, (_, s) in zip(files, hashes)}
                _build(job, _plan(files, target, states), encoder, workers, progress)
    except OSError as error:
        where = error.filename or root
        raise DataError(f"{where}: {error.strerror}; is data.cache_dir writable, with space left?") from error
    return open_cache(folder)


def _complete(folder: Path) -> TokenCache | None:
    """The cache in a folder, unless it is not finished or does not say how many bytes its text has.

    Caches once did not; their tokens, and so their key, are the same, and the build writes them anew.
    """
    if not (folder / "cache.json").exists():
        return None
    cache = open_cache(folder)
    return None if cache.train.text_bytes is None else cache


def _key(
    source: SourceConfig, files: list[File], hashes: list[str], encoder: Tokenizer, validation: float, target: int
) -> str:
    """Hash of all that the bytes of the cache depend on."""
    listed = [[f.name, f.format, h] for f, h in zip(files, hashes)]
    made_from = [VERSION, source.field, encoder.fingerprint, encoder.vocab, encoder.eos, validation, target, listed]
    return hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:32]


def _plan(files: list[File], target: int, states: dict[str, list[int]]) -> list[Shard]:
    plan = plan_shards(files, target)
    return [Shard(i, tuple(p), {s.file.path: states[s.file.path] for s in p}) for i, p in enumerate(plan)]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """One builder at a time; the lock ends with the process that holds it.

    Yields whether there is a lock: some network file systems and Windows have none. Several builders then write
    the same bytes to temporaries of their own, which costs time and harms nothing.
    """
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with open(folder / ".lock", "wb") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            yield False
        else:
            yield True


def _build(job: Job, shards: list[Shard], encoder: Tokenizer, workers: int | None, progress: Progress | None) -> None:
    folder = Path(job.folder)
    todo = [s for s in shards if not _intact(folder, s.index, job.key)]
    total, done = sum(s.size for s in shards), sum(s.size for s in shards) - sum(s.size for s in todo)

    def report(shard: Shard | None) -> None:
        nonlocal done
        done += shard.size if shard else 0
        if progress:
            progress(done, total)

    report(None)
    count = min(workers or available_cores(), len(todo))
    if count <= 1 or sum(s.size for s in todo) <= SMALL * (16 if job.tokenizer == "bytes" else 1):
        for shard in todo:
            write_shard(job, shard, encoder)
            report(shard)
    else:
        _run_workers(job, todo, count, report)
    finish(folder, job.key, len(shards), encoder)


def _intact(folder: Path, index: int, key: str) -> bool:
    """Returns whether a shard is finished and its files are what was written."""
    marker = read_marker(folder, index, key)
    if marker is None or "text_bytes" not in marker[SPLITS[0]]:
        return False
    wanted = {folder / f"{index:05d}.count": marker["count"]}
    for split in SPLITS:
        wanted |= {shard_file(folder, split, index, kind): marker[split][kind] for kind in ("bin", "len")}
    return all(path.exists() and hash_tokens(path) == expected for path, expected in wanted.items())


def _run_workers(job: Job, todo: list[Shard], count: int, report: Callable[[Shard], None]) -> None:
    """Hand shards to `count` worker processes as they become free."""
    waiting: queue.SimpleQueue[Shard] = queue.SimpleQueue()
    for shard in sorted(todo, key=lambda s: -s.size):
        waiting.put(shard)
    results: queue.SimpleQueue[Shard | Exception] = queue.SimpleQueue()
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-m", "jaxtrain.data.token_cache.worker"]
    pipe = subprocess.PIPE
    processes = [  # in sessions of their own: Ctrl-C is for this process, which ends them
        subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True, start_new_session=True)
        for _ in range(count)
    ]
    threads = [threading.Thread(target=_feed, args=(p, job, waiting, results), daemon=True) for p in processes]
    try:
        for thread in threads:
            thread.start()
        for _ in todo:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            report(result)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in processes:
            for stream in (process.stdin, process.stdout):
                if stream:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def _feed(
    process: subprocess.Popen[str],
    job: Job,
    waiting: queue.SimpleQueue[Shard],
    results: queue.SimpleQueue[Shard | Exception],
) -> None:
    """Drive one worker: a shard out, an answer back."""
    stdin, stdout = process.stdin, process.stdout
    shard: Shard | None = None
    try:
        if stdin is None or stdout is None:
            raise DataError("the worker has no standard streams")
        _send(stdin, job.to_json())
        while True:
            shard = waiting.get_nowait()
            _send(stdin, shard.to_json())
            line = stdout.readline()
            answer = json.loads(line) if line else {}
            if "done" not in answer:
                raise DataError(answer["error"]) if answer else BrokenPipeError
            results.put(shard)
    except queue.Empty:
        return
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            results.put(error)
            return
        where = f"{shard.spans[0].file.path}" if shard else job.folder
        code = process.wait()
        what = f"the tokenizing process died (exit code {code}); fewer data.workers need less memory"
        results.put(DataError(f"{where}: {what}"))


def _send(stream: IO[str], line: str) -> None:
    stream.write(line + "\n")
    stream.flush()
