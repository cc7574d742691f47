"""Requests of one process of several: all carry out the same one after the same step."""

from __future__ import annotations

import random

import jax
import pytest

from jaxtrain.trainer import joint_requests
from jaxtrain.trainer.joint_requests import JointRequests
from jaxtrain.trainer.requests import Request, Requests

SAVE, STOP = Request("save", "SIGUSR1"), Request("stop", "enough")


class Service:
    """The key-value service; a name is stored once, unless it may be overwritten."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}


class Store:
    """`KeyValueStore` of the service that this test has."""

    service = Service()

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def child(self, name) -> Store:
        return Store(f"{self._prefix}/{name}")

    def put(self, name, text="", overwrite=False) -> None:
        key = f"{self._prefix}/{name}"
        if key in self.service.entries and not overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.service.entries[key] = text

    def get(self, name) -> str | None:
        return self.service.entries.get(f"{self._prefix}/{name}")

    def entries(self) -> dict[str, str]:
        found = {key.rpartition("/"): text for key, text in self.service.entries.items()}
        return {name: text for (folder, _, name), text in found.items() if folder == self._prefix}


@pytest.fixture
def processes(monkeypatch) -> list[JointRequests]:
    monkeypatch.setattr(Store, "service", Service())
    monkeypatch.setattr(joint_requests, "KeyValueStore", Store)
    monkeypatch.setattr(joint_requests, "broadcast", lambda _: 7)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    made = []
    for index in range(3):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        made.append(JointRequests())
    return made


def run(processes, asked, seed, steps=80) -> list[list[tuple[int, str]]]:
    """What each process carries out after which step; no process is more than a step ahead of another."""
    rng, done = random.Random(seed), [0] * len(processes)
    found: list[list[tuple[int, str]]] = [[] for _ in processes]
    while min(done) < steps:
        rng.choice(processes)()  # its thread
        index = rng.choice([i for i in range(len(processes)) if done[i] <= min(done) and done[i] < steps])
        done[index] += 1
        for request in asked.get((index, done[index]), ()):
            processes[index].ask(request)
        found[index] += [(done[index], request.kind) for request in processes[index].due(done[index])]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_all_do_the_same_after_the_same_step_whoever_asks(processes, seed):
    found = run(processes, {(2, 3): [SAVE], (0, 3): [STOP], (1, 40): [SAVE]}, seed)
    assert found[0] == found[1] == found[2]
    assert sorted(kind for _, kind in found[0]) == ["save", "save", "stop"]


@pytest.mark.parametrize("seed", range(5))
def test_what_all_ask_is_done_once(processes, seed):
    found = run(processes, {(index, 4): [STOP] for index in range(3)}, seed)
    assert found[0] == found[1] == found[2]
    assert [kind for _, kind in found[0]] == ["stop"]


def test_one_process_acts_at_once():
    requests = Requests()
    requests.ask(SAVE)
    requests.ask(SAVE)
    requests.ask(STOP)
    assert requests.due(1) == [SAVE, STOP]
    assert requests.due(2) == []


def test_a_process_that_fails_ends_the_others_in_one_line(processes, monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(joint_requests.os, "_exit", ended.append)
    monkeypatch.setattr(joint_requests, "PATIENCE", 0.1)
    processes[1].report_failure("KeyError: 'x'")
    for process in processes:
        process()
    assert ended == [1, 1]  # not the one that failed, which ends by itself
    line = "jaxtrain: process 1 ends, and this one with it: KeyError: 'x'"
    assert capsys.readouterr().err.splitlines() == [line, line]
