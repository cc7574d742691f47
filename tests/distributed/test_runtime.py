"""The compilation cache is used where a program read back from it does what the compiled one did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.distributed import runtime

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jaxtrain.config.schema import Config
from jaxtrain.distributed.runtime import start

jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
for folder in sys.argv[2:]:
    jax.config.update("jax_compilation_cache_dir", folder)
    start(int(sys.argv[1]))
    jax.jit(lambda x: x @ x)(jnp.ones((4, 4)))
"""


@pytest.mark.parametrize(("devices", "kept"), [(1, True), (2, False)])
def test_only_one_cpu_device_reads_programs_from_the_cache(devices: int, kept: bool, tmp_path: Path):
    """XLA forgets the order of collectives. A second run in a process has its own folder."""
    folders = [tmp_path / "a", tmp_path / "b"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    subprocess.run([sys.executable, "-c", PROGRAM, str(devices), *map(str, folders)], env=env, check=True, timeout=120)
    assert [any(folder.glob("*-cache")) for folder in folders] == [kept, kept]


@pytest.mark.parametrize(
    ("address", "gloo"),
    [("127.0.0.1:77", "127.0.0.1"), ("localhost:77", "127.0.0.1"), ("[::1]:77", "::1"), ("10.0.0.1:77", None)],
)
def test_a_coordinator_on_this_machine_listens_on_loopback_alone(address: str, gloo: str | None, monkeypatch):
    seen: dict[str, Any] = {"gloo": None}
    monkeypatch.setattr(runtime.jax.distributed, "initialize", lambda *args, **options: seen.update(options, args=args))
    monkeypatch.setattr(runtime.jax.config, "update", lambda *args: None)
    monkeypatch.setattr(runtime, "_bind_gloo_to_loopback", lambda host: seen.update(gloo=host))
    monkeypatch.setenv(runtime.COORDINATOR, address)
    monkeypatch.setenv(runtime.PROCESS, "1")
    runtime._join_processes(3)
    assert seen["args"] == (address, 3, 1)
    assert seen["coordinator_bind_address"] == (address if gloo else None)
    assert seen["gloo"] == gloo
