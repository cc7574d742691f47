"""`jaxtrain launch local ... -- python script.py`: a user's script is what the workers run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import environment, losses

SCRIPT = Path(__file__).parent / "launched_script.py"


def script(place: Path, steps: int, mode: str = "") -> list[str]:
    return [sys.executable, str(SCRIPT), str(place), str(steps), *([mode] if mode else [])]


def launch(place: Path, steps: int, mode: str = "", *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxtrain.cli.main", "launch", "local", "--processes=2", "--backoff=0.1", *more]
    return subprocess.Popen(
        [*command, "--", *script(place, steps, mode)], env=environment(), cwd=place, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=240)
    return process.returncode, output


def workers(run: Path) -> dict[int, int]:
    """Process -> pid of the living processes of a script."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if str(SCRIPT) in (folder / "cmdline").read_text():
                env = dict(pair.partition("=")[::2] for pair in (folder / "environ").read_text().split("\0"))
                if env.get("JAXTRAIN_RUN") == str(run):
                    found[int(env["JAX_PROCESS_ID"])] = int(folder.name)
        except OSError:
            continue
    return found


def reaches(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while max(losses(run), default=0) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[dict[int, float], str]:
    """Losses of the script in one process without a launcher, and what it writes after its run."""
    place = tmp_path_factory.mktemp("alone")
    subprocess.run(script(place, 30), env=environment(), check=True, timeout=240, capture_output=True)
    return losses(place / "script"), (place / "after-0").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the workers in /proc")
def test_a_killed_worker_and_a_stopped_job_change_nothing(tmp_path: Path, alone):
    """The rest of the script runs once, after the last step; a signal ends it before."""
    run = tmp_path / "script"
    first = launch(tmp_path, 30, "slow", "--memory=1")
    reaches(run, 5, first)
    os.kill(workers(run)[1], signal.SIGKILL)
    reaches(run, max(losses(run)) + 4, first)
    first.send_signal(signal.SIGTERM)
    code, output = ended(first)
    assert code == 75, output
    assert output.count("devices are there") == 2  # of process 0 in two generations, none of the description
    assert "next  jaxtrain launch local --processes=2 --memory=1 -- " in output
    assert not list(tmp_path.glob("after-*"))
    assert max(losses(run)) < 30
    code, output = ended(launch(tmp_path, 30, "slow"))
    assert code == 0, output
    expected, after = alone
    got = losses(run)
    assert sorted(got) == sorted(expected)
    assert [got[step] for step in sorted(got)] == pytest.approx([expected[step] for step in sorted(got)], rel=1e-5)
    for index in range(2):
        step, loss = (tmp_path / f"after-{index}").read_text().split()
        assert step == after.split()[0]
        assert float(loss) == pytest.approx(float(after.split()[1]), rel=1e-4)
    assert not workers(run)


def test_an_error_of_one_worker_ends_all(tmp_path: Path):
    code, output = ended(launch(tmp_path, 30, "raises", "--max-restarts=1"))
    assert code == 1
    assert "no such point" in output
    assert not list(tmp_path.glob("after-*"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("mode", "said"),
    [("no run", "before it trained; expected a script with jaxtrain.Trainer"), ("second", "expected one run in a")],
)
def test_a_script_that_cannot_be_launched_is_told_in_one_line(tmp_path: Path, mode: str, said: str):
    code, output = ended(launch(tmp_path, 4, mode))
    assert code == 2, output
    assert said in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected a config, a run, or a command"),
        (("configs/quickstart.yaml", "--", "python", "x.py"), "expected the config in the script"),
        (("--", "no-such-command"), "no-such-command: No such file or directory"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], said: str):
    command = [sys.executable, "-m", "jaxtrain.cli.main", "launch", "local", "--processes=2", *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
