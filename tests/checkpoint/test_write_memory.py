"""Memory that writing a checkpoint needs in addition to the state: that of one shard at a time."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.state_tree import trim_heap

STATUS, MB = Path("/proc/self/status"), 1 << 20


def anonymous() -> int:
    """Bytes of this process that are no file's pages."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@pytest.mark.measures
@pytest.mark.skipif(not STATUS.is_file(), reason="needs Linux's /proc")
def test_writing_needs_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(orbax, "_WRITE", 1)  # the largest array is the bound
    monkeypatch.setattr(orbax, "_CHUNK", MB)  # smaller than an array, so that chunks are copies
    tree = {str(i): jax.block_until_ready(jnp.full((4, 256, 1024), i, jnp.float32)) for i in range(40)}
    trim_heap()
    begun = highest = anonymous()
    done = threading.Event()

    def sample() -> None:
        nonlocal highest
        while not done.wait(0.002):
            highest = max(highest, anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    orbax.write(tmp_path / "one", tree, 60)
    done.set()
    thread.join()
    assert highest - begun < 80 * MB, f"{(highest - begun) / MB:.0f} MB besides 160 MB"  # a copy of all takes 160 MB
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in tree.items()}
    back = orbax.read(tmp_path / "one", shapes, False)
    assert all(np.array_equal(back[name], tree[name]) for name in tree)
