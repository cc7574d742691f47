"""Starts JAX as config and environment say: simulated devices, several processes, compilation cache."""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.core import xla_options
from jaxtrain.distributed.compile_cache import write_entries_atomically
from jaxtrain.errors import UserError

# Environment variables that JAX and cluster launchers use.
COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
GENERATION = "JAXTRAIN_GENERATION"  # number of the generation of a launched run
COMPILE_CACHE = Path("~/.cache/jaxtrain/xla")
HEARTBEAT_TIMEOUT = 30  # seconds of silence until JAX declares a process lost; a busy machine pauses for less
IN_NOTEBOOK = "; in a notebook, restart its kernel first"
EXPECTED = "expected jaxtrain.initialize(simulate) before anything else uses JAX, such as the creation of a module"
SERVICE_TIMEOUT = 2.0  # seconds in which JAX's preemption service shuts down, unless it never does
SHUTDOWN_TIMEOUT = 60  # seconds that a process waits at exit for the others


def start(simulate: int | None) -> list[Any]:
    """Initializes JAX and returns the devices of all processes.

    With `JAX_COORDINATOR_ADDRESS` (host:port), `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` in the environment it joins
    several processes; simulated devices are then divided among them equally.

    Raises:
        UserError: JAX runs already with other devices than `simulate` says, or the environment is incomplete.
    """
    xla_options.prepare()
    count = process_count()
    if simulate is not None:
        if simulate % count:
            raise UserError(f"simulate: {simulate} devices cannot be divided among {count} processes")
        _simulate_devices(simulate // count)
    if count > 1 and not jax.distributed.is_initialized():
        _join_processes(count)
    devices = jax.devices()
    if simulate is not None and (devices[0].platform != "cpu" or len(devices) != simulate):
        raise UserError(
            f"simulate: JAX runs already with {len(devices)} {devices[0].platform} devices, not {simulate} "
            f"simulated ones; {EXPECTED}{IN_NOTEBOOK if 'ipykernel' in sys.modules else ''}"
        )
    _set_compilation_cache(devices)
    return devices


def process_count() -> int:
    """Returns the number of processes of this run, from the environment."""
    text = os.environ.get(PROCESSES, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{PROCESSES}: expected a positive number; found {text!r}")
    return int(text)


def generation() -> int | None:
    """Returns the number of this generation of a launched run; None for a run that was not launched."""
    text = os.environ.get(GENERATION, "")
    return int(text) if text.isdecimal() else None


def _set_compilation_cache(devices: list[Any]) -> None:
    """Sets the folder of compiled programs, unless JAX_COMPILATION_CACHE_DIR does."""
    # XLA (jaxlib 0.10) loses the order of collectives when it reads a program for several CPU devices from the cache:
    # the devices then run them in different orders and wait for each other until XLA aborts the process.
    if devices[0].platform == "cpu" and len(devices) > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(COMPILE_CACHE.expanduser()))
    write_entries_atomically()
    compilation_cache.reset_cache()  # otherwise an earlier compilation of this process has fixed the folder


def _join_processes(count: int) -> None:
    index, address = os.environ.get(PROCESS, ""), os.environ.get(COORDINATOR, "")
    if not index.isdecimal() or int(index) >= count or ":" not in address:
        raise UserError(
            f"{count} processes need {COORDINATOR}=host:port and {PROCESS} from 0 to {count - 1}; "
            f"found {address!r} and {index!r}"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # By default the coordinator listens on every network of the machine.
    host = address.rpartition(":")[0]
    bind = address if host in ("127.0.0.1", "localhost", "[::1]") else None
    if bind is not None:
        _bind_gloo_to_loopback("::1" if host == "[::1]" else "127.0.0.1")
    try:
        jax.distributed.initialize(
            address,
            count,
            int(index),
            coordinator_bind_address=bind,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
        )
    except RuntimeError as error:
        if "before any JAX calls" not in str(error):
            raise
        raise UserError(f"{count} processes: JAX runs already in this one alone; {EXPECTED}") from error
    atexit.register(_leave_preemption_service)  # which runs before JAX's own shutdown, registered earlier


def _leave_preemption_service() -> None:
    # If SIGTERM came in the last second, JAX's service waits for the step counter of a process that has already shut
    # its own down, and holds a lock for which its shutdown waits in turn, until the other processes abort after
    # `SHUTDOWN_TIMEOUT`. It is then left alone. Its destructor would wait too, and its threads may still use the
    # client, so both stay until the process is gone.
    state: Any = importlib.import_module("jax._src.distributed").global_state
    service, state.preemption_sync_manager = getattr(state, "preemption_sync_manager", None), None
    if service is None:
        return
    leaving = threading.Thread(target=service.shutdown, daemon=True)
    leaving.start()
    leaving.join(SERVICE_TIMEOUT)
    if leaving.is_alive():
        for kept in (service, state.client):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def _bind_gloo_to_loopback(host: str) -> None:
    # Gloo listens on the address of the machine's host name, and JAX has no option for it.
    jaxlib: Any = importlib.import_module("jaxlib._jax")
    make = jaxlib.make_gloo_tcp_collectives
    if not isinstance(make, partial):
        jaxlib.make_gloo_tcp_collectives = partial(make, hostname=host)


def _simulate_devices(count: int) -> None:
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX runs already; the caller checks its devices
