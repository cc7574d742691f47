"""The compilation cache is used where a program read back from it does what the compiled one did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jaxtrain.config.schema import Config
from jaxtrain.train.platform import start

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
for folder in sys.argv[2:]:
    start(Config(simulate=int(sys.argv[1]), compile_cache=folder))
    jax.jit(lambda x: x @ x)(jnp.ones((4, 4)))
"""


@pytest.mark.parametrize(("devices", "kept"), [(1, True), (2, False)])
def test_only_one_cpu_device_reads_programs_from_the_cache(devices: int, kept: bool, tmp_path: Path):
    """XLA forgets the order of collectives. A second run in a process has its own folder."""
    folders = [tmp_path / "a", tmp_path / "b"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    subprocess.run([sys.executable, "-c", PROGRAM, str(devices), *map(str, folders)], env=env, check=True, timeout=120)
    assert [any(folder.glob("*-cache")) for folder in folders] == [kept, kept]
