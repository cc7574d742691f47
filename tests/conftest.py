"""Eight simulated CPU devices for every test, set before JAX is imported.

On a machine with a GPU, JAXTRAIN_TEST_PLATFORMS=cuda,cpu also runs what needs one; JAXTRAIN_TEST_DEVICES=16 is for
`make matrix`.
"""

import ctypes
import gc
import os
import signal
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from selection import left_out_cases

from jaxtrain.core import xla_options

os.environ["JAX_PLATFORMS"] = os.environ.get("JAXTRAIN_TEST_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = os.environ.get("JAXTRAIN_TEST_DEVICES", "8")
# Compiling is most of a test's time: the cheapest code generation takes a quarter of it. Collectives are the same;
# only elementwise operations are fused otherwise.
CHEAP = xla_options.as_flags(xla_options.fast_compile() | {"xla_cpu_parallel_codegen_split_count": 1})
if CHEAP not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CHEAP}".strip()


def own_core(worker: str, workers: int) -> None:
    """Gives each of pytest-xdist's workers, and what it starts, a core: eight devices on one core take turns, on
    several they wait for one another, which costs half again as much processor time and no less of the clock's."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if worker.startswith("gw") and workers <= len(cores):
        os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})


# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")
MOST_RESIDENT = 2 << 30  # bytes

xla_options.prepare()
own_core(os.environ.get("PYTEST_XDIST_WORKER", ""), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, metavar="N", help="run a sample of the tests: about one in N")
    parser.addoption("--sampled", action="store_true", help="of tests marked `sampled(N)` run one case in N")
    parser.addoption(
        "--sample", type=int, default=0, metavar="S", help="number of the sample, with --one-in or --sampled"
    )


@pytest.hookimpl(trylast=True)  # after -m: a sample is of the cases that would run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("measures"):  # others may keep the machine busy for some seconds
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    number, sample = config.getoption("--one-in"), config.getoption("--sample")
    left_out = left_out_cases(items, sample) if config.getoption("--sampled") else set()
    left_out |= {item.nodeid for item in items if zlib.crc32(f"{sample} {item.nodeid}".encode()) % number}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.fixture(autouse=True, scope="module")
def bounded_memory() -> Iterator[None]:
    """JAX keeps what it has traced and compiled, with all that it refers to: by thousands of tests more than a machine
    has, whose kernel then kills a process. From some size on that is dropped after each file."""
    yield
    if resident_bytes() > MOST_RESIDENT:
        import jax  # after the environment above is set

        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc
            libc.malloc_trim(0)


def resident_bytes() -> int:
    """Memory of this process; 0 where the kernel does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.fixture
def default_hangup() -> Iterator[None]:
    """SIGHUP as in a terminal, also if the tests run under `nohup`, which ignores it for all processes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Address of a stand-in for S3 in this process, on loopback."""
    server = pytest.importorskip("moto.server", reason="needs moto (jaxtrain[s3-test])")
    pytest.importorskip("s3fs", reason="needs s3fs (jaxtrain[s3])")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new bucket of the stand-in, which the environment points at."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": s3_server, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    bucket = uuid.uuid4().hex
    s3fs.S3FileSystem().mkdir(bucket)
    return f"s3://{bucket}"
