"""Checks of `jaxtrain doctor`, each of which looks at one part of this machine. None imports JAX into this process."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from jaxtrain.cli.setup import has_nvidia_driver, has_tpu
from jaxtrain.io.packages import installed_version

GIB = 2**30
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
OPTIONAL = {  # package -> extra
    "tokenizers": "data", "pyarrow": "data", "datasets": "hf", "fsspec": "remote", "wandb": "wandb",
    "jax-cuda13-plugin": "cuda", "libtpu": "tpu",
}  # fmt: skip
CACHES = ("~/.cache/jaxtrain",)
VARIABLES = {  # what they may do to a run
    "XLA_FLAGS": "changes how XLA compiles",
    "JAX_PLATFORMS": "restricts the devices that JAX sees",
    "JAX_ENABLE_X64": "makes float64 the default",
    "JAX_DISABLE_JIT": "runs without compiling, slowly",
    "JAX_DEBUG_NANS": "checks every operation, slowly",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "changes how JAX takes GPU memory",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "changes how much GPU memory JAX takes",
    "JAX_NUM_PROCESSES": "makes this a process of several, which wait for each other",
}
DEVICES = """
import json, jaxtrain.cli.setup as setup
setup.prepare_jax_import(None)
import jax
devices = jax.devices()
limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
print(json.dumps({"count": len(devices), "kind": devices[0].device_kind, "platform": devices[0].platform,
                  "limit": min((limit for limit in limits if limit), default=None)}))
"""


class Finding(NamedTuple):
    """A line of a check."""

    level: Literal["ok", "warn", "ERROR"]
    text: str


def machine_checks(directory: str, timeout: float) -> dict[str, Callable[[], list[Finding]]]:
    """Returns the checks by title.

    Args:
        directory: folder that runs are written to.
        timeout: seconds for the processes that a check starts.
    """
    return {
        "versions": versions,
        "devices": partial(devices, timeout),
        "memory": memory,
        "disk": partial(disk, directory),
        "cache": compilation_cache,
        "ports": ports,
        "clock": partial(clock, directory),
        "limits": limits,
        "environment": environment,
    }


def versions() -> list[Finding]:
    """Returns the versions of the interpreter and of the packages, and the optional ones."""
    python = ".".join(map(str, sys.version_info[:3]))
    found = {name: installed_version(name) for name in ("jaxtrain", *PACKAGES)}
    absent = [name for name, version in found.items() if not version]
    text = f"Python {python}, " + ", ".join(f"{name} {version}" for name, version in found.items() if version)
    lines = [Finding("ok", text)]
    lines += [Finding("ERROR", f"no {name}; expected pip install jaxtrain to bring it") for name in absent]
    optional = [f"{name} {version}" for name in OPTIONAL if (version := installed_version(name))]
    missing = sorted({extra for name, extra in OPTIONAL.items() if not installed_version(name)})
    lines.append(Finding("ok", f"optional: {', '.join(optional) or 'none'}; extras not here: {', '.join(missing)}"))
    return lines


def devices(timeout: float) -> list[Finding]:
    """Starts JAX in a process of its own, which is killed if it hangs, and returns its devices."""
    command = [sys.executable, "-c", DEVICES]
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_NUM_PROC")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, env=env, stdin=subprocess.DEVNULL, check=False
        )
    except subprocess.TimeoutExpired:
        return [Finding("ERROR", f"JAX does not start within {timeout:g} s; another process may hold the device")]
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Finding("ERROR", f"JAX does not start (exit code {done.returncode}): {last}")]
    return device_findings(json.loads(done.stdout.splitlines()[-1]), has_nvidia_driver(), has_tpu())


def device_findings(found: dict[str, object], has_nvidia: bool, has_google: bool) -> list[Finding]:
    """Returns the devices of JAX, and warns of an accelerator that JAX does not use."""
    limit = found["limit"]
    size = f", {limit / GIB:.1f} GiB each" if isinstance(limit, int) else ""
    lines = [Finding("ok", f"{found['count']} x {found['kind']} ({found['platform']}){size}")]
    if found["platform"] == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        lines.append(Finding("ok", f"{cores} CPU cores; `simulate=8` tries layouts on simulated devices"))
        for is_there, name, extra in ((has_nvidia, "an NVIDIA GPU", "cuda"), (has_google, "a TPU", "tpu")):
            if is_there:
                fix = f"expected pip install 'jaxtrain[{extra}]', and no JAX_PLATFORMS that hides it"
                lines.append(Finding("warn", f"{name} is here and JAX does not use it; {fix}"))
    return lines


def memory() -> list[Finding]:
    """Returns the memory that is free, and the limit of the container."""
    file = Path("/proc/meminfo")
    if not file.exists():
        return [Finding("ok", "unknown without /proc")]
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if ":" in line}
    total, free = sizes["MemTotal"], sizes["MemAvailable"]
    lines = []
    limit = _container_limit()
    if limit is not None and limit < total:
        total, free = limit, min(free, limit)
        lines.append(Finding("ok", f"the container is limited to {limit / GIB:.1f} GiB"))
    level = "warn" if free < 2 * GIB else "ok"
    advice = "; close other programs before a run needs it" if level == "warn" else ""
    return [Finding(level, f"{free / GIB:.1f} of {total / GIB:.1f} GiB free{advice}"), *lines]


def _container_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def disk(directory: str) -> list[Finding]:
    """Writes, syncs and renames a file where runs and caches are, and returns the free space there."""
    lines = []
    for name in (directory, *CACHES, tempfile.gettempdir()):
        folder = _existing(Path(name).expanduser())
        free = shutil.disk_usage(folder).free / GIB
        try:
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(prefix=".jaxtrain-doctor-", dir=folder) as place:
                file = Path(place) / "written"
                with file.open("wb") as stream:
                    stream.write(b"x" * 2**20)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(file, file.with_name("renamed"))
            seconds = time.monotonic() - begin
        except OSError as error:
            lines.append(Finding("ERROR", f"{name}: cannot write there: {error.strerror}"))
            continue
        problem = "nearly full" if free < 1 else "slow" if seconds > 2 else ""
        text = f"{name}: {free:.1f} GiB free, 1 MiB written and synced in {seconds * 1000:.0f} ms"
        lines.append(Finding("warn" if problem else "ok", f"{text}; {problem}" if problem else text))
    return lines


def _existing(folder: Path) -> Path:
    """Returns the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def compilation_cache() -> list[Finding]:
    """Returns where compiled programs are kept, and how large that is."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = Path(given or "~/.cache/jaxtrain/xla").expanduser()
    size = sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()) if folder.is_dir() else 0
    source = " (JAX_COMPILATION_CACHE_DIR)" if given else ""
    lines = [Finding("ok", f"{folder}{source}: {size / 2**20:.0f} MiB of compiled programs")]
    if not os.access(_existing(folder), os.W_OK):
        lines.append(Finding("warn", "it cannot be written: every run compiles anew"))
    return lines


def ports() -> list[Finding]:
    """Listens on a free port and connects to it, as processes of a launched run do; looks up this host's name."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)
        with socket.create_connection(server.getsockname(), timeout=5):
            server.accept()[0].close()
    lines = [Finding("ok", "processes on this machine reach each other")]
    host, begin = socket.gethostname(), time.monotonic()
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
    except OSError:
        text = f"the host name {host} has no address: runs on several machines need --host ADDRESS"
        return [*lines, Finding("warn", text)]
    seconds = time.monotonic() - begin
    if seconds > 2:
        lines.append(
            Finding("warn", f"the look-up of {host} took {seconds:.0f} s: each start of a process waits for it")
        )
    elif str(address).startswith("127."):
        text = f"the host name {host} is {address}: other machines need --host ADDRESS or --coordinator to find it"
        lines.append(Finding("ok", text))
    else:
        lines.append(Finding("ok", f"the host name {host} is {address}"))
    return lines


def clock(directory: str) -> list[Finding]:
    """Compares the clock with that of the disk: `report` and files of several machines use both."""
    now = time.time()
    lines = [Finding("ok", f"{datetime.fromtimestamp(now).astimezone().isoformat(timespec='seconds')}")]
    if now < Path(__file__).stat().st_mtime - 86400:
        lines.append(Finding("warn", "the clock is behind the day of the installation; set it before a run"))
    with tempfile.NamedTemporaryFile(prefix=".jaxtrain-doctor-", dir=_existing(Path(directory).expanduser())) as file:
        file.write(b"x")
        file.flush()
        apart = os.stat(file.name).st_mtime - time.time()
    if abs(apart) > 5:
        lines.append(
            Finding("warn", f"the clock of the disk of {directory} is {apart:+.0f} s from it; synchronise both")
        )
    return lines


def limits() -> list[Finding]:
    """Returns the limits of this process that long runs meet."""
    try:
        import resource
    except ImportError:  # Windows
        return [Finding("ok", "unknown here")]
    lines = []
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = soft != resource.RLIM_INFINITY and soft < 1024
    text = f"{soft} open files" + ("; `ulimit -n 4096` before a run with many data files" if few else "")
    lines.append(Finding("warn" if few else "ok", text))
    for kind, name in ((resource.RLIMIT_AS, "address space"), (resource.RLIMIT_FSIZE, "size of a file")):
        value = resource.getrlimit(kind)[0]
        if value != resource.RLIM_INFINITY:
            lines.append(Finding("warn", f"the {name} is limited to {value / GIB:.1f} GiB (ulimit)"))
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total / GIB) < 1:
        text = f"/dev/shm has {size:.2f} GiB: data loaders with workers and NCCL need more (docker: --shm-size)"
        lines.append(Finding("warn", text))
    return lines


def environment() -> list[Finding]:
    """Returns the environment variables that change how a run behaves."""
    lines = [
        Finding("warn", f"{name}={os.environ[name]}: {effect}")
        for name, effect in VARIABLES.items()
        if os.environ.get(name)
    ]
    if has_nvidia_driver() and "cuda" in os.environ.get("LD_LIBRARY_PATH", "").lower():
        text = "LD_LIBRARY_PATH names another CUDA, which may be loaded in place of that of jaxtrain[cuda]"
        lines.append(Finding("warn", text))
    if "utf" not in sys.getfilesystemencoding().lower():
        text = f"file names are {sys.getfilesystemencoding()}, not UTF-8; expected LANG=C.UTF-8"
        lines.append(Finding("warn", text))
    return lines or [Finding("ok", "no variable that changes a run")]
