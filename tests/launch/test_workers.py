"""Environment of a worker, and its exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jaxtrain.checkpoint.memory.client import PeerConfig, peer_config
from jaxtrain.launch.workers import worker_environment

START = {
    "kind": "start", "generation": 3, "run": "/run", "address": "10.0.0.1:77", "processes": 6, "devices_per_process": 2,
    "is_simulated": False, "slots": [1], "ranks": [4], "memory_every": 0, "memory_addresses": [],
}  # fmt: skip


def environment(start: dict, base: dict[str, str]) -> dict[str, str]:
    return worker_environment(start, 4, 1, base, 30, "s")


def test_a_worker_knows_the_others_and_sees_its_own_gpus():
    env = environment(START, {"HOME": "/h", "JAX_PROCESS_ID": "9"})
    assert env["JAX_COORDINATOR_ADDRESS"] == "10.0.0.1:77"
    assert (env["JAX_NUM_PROCESSES"], env["JAX_PROCESS_ID"], env["JAXTRAIN_GENERATION"]) == ("6", "4", "3")
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert env["JAX_LOCAL_DEVICE_IDS"] == "0,1"
    assert "XLA_FLAGS" not in env
    assert env["HOME"] == "/h"
    assert environment(START, {"CUDA_VISIBLE_DEVICES": "7,5,3,1"})["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_a_worker_knows_where_to_copy_its_state_if_it_is_to():
    assert peer_config(environment(START | {"memory_addresses": ["10.0.0.2:5"]}, {})) is None
    assert peer_config(environment(START | {"memory_every": 2}, {})) is None  # no node has room for it
    env = worker_environment(
        START | {"memory_every": 2, "memory_addresses": ["10.0.0.2:5", "::1:6"]}, 4, 1, {}, 30, "s"
    )
    assert peer_config(env) == PeerConfig(2, 3, "s", (("10.0.0.2", 5), ("::1", 6)))


def test_simulated_devices_wait_for_others_only_so_long():
    start = START | {"is_simulated": True}
    env = environment(start, {"XLA_FLAGS": "--xla_a=1"})
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_cpu_collective_timeout_seconds=30"
    assert env["JAX_PLATFORMS"] == "cpu"
    own = {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=5"}
    assert worker_environment(start, 4, 1, own, 30, "s")["XLA_FLAGS"] == own["XLA_FLAGS"]


LEAVE = """
import atexit, os, sys
import jaxtrain.cli.main
from jaxtrain.cli import worker
def command(arguments):
    print(arguments, flush=True)
    if sys.argv[1] == "raise":
        raise OSError("of this process alone")
    return int(sys.argv[1])
jaxtrain.cli.main.main = command
atexit.register(print, "waited for the others")
worker.main(os.getppid(), "resume", "DIR")
"""


@pytest.mark.parametrize(
    ("how", "code", "waits"), [("0", 0, 1), ("75", 75, 1), ("1", 1, 0), ("2", 2, 0), ("raise", 1, 0)]
)
def test_a_failed_worker_leaves_without_waiting_for_the_others(how: str, code: int, waits: int):
    done = subprocess.run([sys.executable, "-c", LEAVE, how], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stdout.splitlines() == ["['resume', 'DIR']", "waited for the others"][: 1 + waits]
    assert ("OSError: of this process alone" in done.stderr) == (how == "raise")


def test_a_worker_whose_agent_is_gone_already_does_not_begin():
    code = (
        "import os; from jaxtrain.io.system import exit_with_parent; exit_with_parent(os.getppid() + 1); print('began')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (137, "")
