"""Mapped files stay below the limit on open files, and running out of files is not reported as damage."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.data.token_cache.store import ShardWriter, TokenCache, finish_cache, open_cache
from jaxtrain.data.token_files import MAX_OPEN_MAPS, MappedFiles, max_open_maps
from jaxtrain.data.tokenizer import ByteTokenizer

pytest.importorskip("resource", reason="this system has no limit on open files")
SHARDS = 60


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three caches of 60 shards with 3 documents each: document d of cache c is 7 times 3 d + c."""
    folders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        for c in range(3):
            folder = tmp_path_factory.mktemp(f"cache{c}")
            for shard in range(SHARDS):
                writer = ShardWriter(folder, shard, 257, 256)
                documents = range(3 * shard, 3 * shard + 3)
                writer.add("train", [np.full(7, (3 * d + c) % 256, np.uint16) for d in documents], 21)
                writer.close("k")
            finish_cache(folder, "k", SHARDS, ByteTokenizer())
            folders.append(folder)
    return folders


READ = """
import os, resource, sys
from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data.token_cache.store import open_cache
from jaxtrain.data.dataset import TextDataset
from jaxtrain.errors import DataError
from jaxtrain.data.tokenizer import ByteTokenizer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
caches = [open_cache(folder) for folder in sys.argv[1:]]
data = DataConfig(sources=(SourceConfig(),) * 3, sequence=16, global_batch=64)
dataset = TextDataset(data, 0, "train", caches, ByteTokenizer())
dataset._reads_ahead = True  # so that it reads ahead as well
for step in range(10):
    for tokens, segments in zip(*(dataset.batch(step)[k] for k in ("tokens", "segments"))):
        for k in range(1, segments.max() + 1):
            piece = [t for t in tokens[segments == k].tolist() if t != 256]
            assert len(set(piece)) <= 1, piece
for i in range(180):
    for c, cache in enumerate(caches):
        assert cache.train.document(i).tolist() == [(3 * i + c) % 256] * 7 + [256]
print("open", len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)

open_files, views = [], []

def use_up():
    try:
        while True:
            open_files.append(open(os.devnull))
    except OSError:
        pass

use_up()
assert caches[0].train.document(1)[0] == 3  # unmaps other files
try:
    while True:  # fewer and fewer can be unmapped
        use_up()
        views.append(caches[1].train.document(3 * len(views)))
except DataError as error:
    print("error", error)
use_up()
for action in (caches[1].train.verify, lambda: open_cache(sys.argv[1])):
    try:
        action()
    except DataError as error:
        print("error", error)
"""


def test_many_shards_under_a_low_limit(folders: list[Path]) -> None:
    done = subprocess.run([sys.executable, "-c", READ, *map(str, folders)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    opened, *errors = done.stdout.splitlines()
    assert int(opened.split()[1]) < 16 + 10
    assert len(errors) == 3
    for line in errors:
        assert "too many open files (this process may have 64); raise the limit with `ulimit -n`" in line
        assert "damaged" not in line


def mapped(caches: list[TokenCache]) -> int:
    return sum(len(split._files._maps) for cache in caches for split in (cache.train, cache.validation))


def test_the_limit_is_shared_by_all_caches(folders: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtrain.data.token_files.MAX_OPEN_MAPS", 50)
    caches = [open_cache(folder) for folder in folders]
    for i in range(100):
        for cache in caches:
            cache.train.document(i)
    assert mapped(caches) <= 50
    assert mapped(caches[:1]) < 20  # the last used stay, of any split
    again = [cache.train.document(99).base for cache in caches]
    assert all(a is cache.train.document(99).base for a, cache in zip(again, caches))


def test_a_dropped_cache_drops_its_maps(folders: list[Path]) -> None:
    cache = open_cache(folders[0])
    files = cache.train._files._ref
    cache.train.document(0)
    gc.disable()
    try:
        del cache
        assert files() is None
    finally:
        gc.enable()
    other = open_cache(folders[1])
    for i in range(180):
        other.train.document(i)
    assert len(MappedFiles._used) <= max_open_maps()


@pytest.mark.parametrize(
    ("soft", "wanted"), [(None, MAX_OPEN_MAPS), (1 << 20, MAX_OPEN_MAPS), (1024, 256), (64, 16), (2, 1)]
)
def test_max_open_maps(monkeypatch: pytest.MonkeyPatch, soft: int | None, wanted: int) -> None:
    monkeypatch.setattr("jaxtrain.data.token_files.open_file_limit", lambda: soft)
    assert max_open_maps() == wanted
