"""Supervisors that a test started do not outlive it."""

from __future__ import annotations

from pathlib import Path

import pytest
from etcd_member import Etcd
from launched import Launched
from scene import opened


@pytest.fixture
def scene(tmp_path: Path):
    yield from opened(tmp_path / "run")


@pytest.fixture
def etcd(tmp_path: Path):
    etcd = Etcd(tmp_path)
    yield etcd
    etcd.close()


@pytest.fixture
def launched(tmp_path: Path):
    made: list[Launched] = []

    def make(steps: int, delay: float = 0.0) -> Launched:
        made.append(Launched(tmp_path, steps, delay))
        return made[0]

    yield make
    for one in made:
        one.close()
