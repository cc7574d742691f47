"""Starts JAX the way a config and the environment ask for: simulated devices, several processes, compilation cache."""

from __future__ import annotations

import importlib
import os
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxtrain.config.schema import Config
from jaxtrain.core import xla_options
from jaxtrain.errors import UserError

# Names that JAX itself and cluster launchers use.
COORDINATOR, PROCESSES, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
COMPILE_CACHE = Path("~/.cache/jaxtrain/xla")
HEARTBEAT = 30  # seconds without a sign of life after which JAX gives a process up; more than a busy machine's pauses
SHUTDOWN = 60  # seconds that a process waits at its end for the others


def start(config: Config) -> list[Any]:
    """Devices of this run, those of all processes.

    Several processes are joined where `JAX_COORDINATOR_ADDRESS` (host:port), `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID` are set; simulated devices are then shared out equally.

    Raises:
        ValueError: JAX runs already, with other devices than `simulate` asks for, or the environment is incomplete.
    """
    xla_options.prepare()
    count = processes()
    if config.simulate is not None:
        if config.simulate % count:
            raise UserError(f"simulate: {config.simulate} devices cannot be shared out among {count} processes")
        _simulate(config.simulate // count)
    if count > 1 and not jax.distributed.is_initialized():
        _join(count)
    devices = jax.devices()
    if config.simulate is not None and (devices[0].platform != "cpu" or len(devices) != config.simulate):
        raise UserError(
            f"simulate: JAX runs already with {len(devices)} {devices[0].platform} devices, not {config.simulate} "
            "simulated ones; set simulate before anything else uses JAX"
        )
    _cache(devices)
    return devices


def processes() -> int:
    """Number of processes of this run, from the environment."""
    text = os.environ.get(PROCESSES, "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{PROCESSES}: expected a positive number; found {text!r}")
    return int(text)


def _cache(devices: list[Any]) -> None:
    """Sets where XLA keeps compiled programs, unless JAX_COMPILATION_CACHE_DIR does."""
    # A program for several CPU devices that XLA (jaxlib 0.10) reads back from the cache has forgotten the order of its
    # collectives: the devices meet them in different orders and wait for each other until XLA aborts the process.
    if devices[0].platform == "cpu" and len(devices) > 1:
        jax.config.update("jax_enable_compilation_cache", False)
    elif jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_compilation_cache_dir", str(COMPILE_CACHE.expanduser()))
    compilation_cache.reset_cache()  # otherwise what the process compiled before has decided


def _join(count: int) -> None:
    index, address = os.environ.get(PROCESS, ""), os.environ.get(COORDINATOR, "")
    if not index.isdecimal() or int(index) >= count or ":" not in address:
        raise UserError(
            f"{count} processes need {COORDINATOR}=host:port and {PROCESS} from 0 to {count - 1}; "
            f"found {address!r} and {index!r}"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX would have the coordinator listen on every network of the machine.
    bind = address if address.rpartition(":")[0] in ("127.0.0.1", "localhost") else None
    if bind is not None:
        _keep_gloo_on_loopback()
    jax.distributed.initialize(
        address,
        count,
        int(index),
        coordinator_bind_address=bind,
        heartbeat_timeout_seconds=HEARTBEAT,
        shutdown_timeout_seconds=SHUTDOWN,
    )


def _keep_gloo_on_loopback() -> None:
    # It would listen on the address that the machine's name has, and JAX has no option for it.
    jaxlib: Any = importlib.import_module("jaxlib._jax")
    make = jaxlib.make_gloo_tcp_collectives
    if not isinstance(make, partial):
        jaxlib.make_gloo_tcp_collectives = partial(make, hostname="127.0.0.1")


def _simulate(count: int) -> None:
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX runs already: what counts is the devices it has, which the caller checks.
