"""One of two processes that train a little and save, while saves fail; run by test_joint_retry.py."""

from __future__ import annotations

import errno
import faulthandler
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import Checkpointer, Committed, Copied, Retrying, SaveFailed, orbax
from jaxtrain.checkpoint.store import TEMPORARY, CheckpointStore
from jaxtrain.distributed.multihost import broadcast

faulthandler.dump_traceback_later(120, exit=True)
PORT, INDEX, PLACE = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
SOON = (0.02, 0.02)
LATER = (60.0, 60.0)
BLOCK = 10  # steps between which the processes agree on nothing but what is tested


class Full:
    """What waits for a save's end and finds the disk full."""

    def __init__(self, real):
        self._real, self.folder = real, real.folder

    def result(self):
        self._real.result()
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def failing(process: int, times: int, at_once: bool = False):
    """A disk that is full for one process so many times; `at_once`: the caller's thread meets it, the others do not."""
    real, left = orbax.start, [times if process == INDEX else 0]

    def start(*args):
        out = real(*args)
        left[0] -= 1
        if left[0] < 0:
            return out
        if at_once:
            with suppress(Exception):
                out.result()  # a save that failed writes nothing any more when its files are deleted
            raise OSError(errno.ENOSPC, "No space left on device")
        return Full(out)

    orbax.start = start
    try:
        yield
    finally:
        orbax.start = real


@contextmanager
def failing_call(name: str):
    """A function of `os` that finds the disk full once, on process 0, at a folder that orbax writes."""
    real, failures = getattr(os, name), []

    def call(path, *args, **options):
        if INDEX == 0 and not failures and TEMPORARY in str(path):
            failures.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *args, **options)

    setattr(os, name, call)
    try:
        yield
    finally:
        setattr(os, name, real)
    assert INDEX or failures


def setup():
    address = f"127.0.0.1:{PORT}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, INDEX, coordinator_bind_address=address, initialization_timeout=60)
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    placed = {"w": NamedSharding(mesh, P("data")), "step": NamedSharding(mesh, P())}
    like = {
        "w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=placed["w"]),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=placed["step"]),
    }

    def initial():
        return {"w": jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64), "step": jnp.int32(0)}

    def advance(state):
        state = {"w": state["w"] * 1.0001 + 1, "step": state["step"] + 1}
        return state, state["w"].sum()

    return like, jax.jit(initial, out_shardings=placed), jax.jit(advance, donate_argnums=0)


LIKE, INITIAL, ADVANCE = setup()


class Training:
    """A loop as that of `jaxtrain.trainer.loop`: the metrics of a step are read when the next one is dispatched."""

    def __init__(self, name: str, waits, **options):
        self.checkpoints = Checkpointer(PLACE / name, waits=waits, **{"timeout": 60, **options})
        self.state, self.done, self.before = INITIAL(), 0, None
        self.saved, self.events = [], []

    def steps(self, many: int, admits=lambda done: True, asks: bool = True) -> None:
        for _ in range(many):
            self.state, metrics = ADVANCE(self.state)
            if self.before is not None:
                float(self.before)
            self.before, self.done = metrics, self.done + 1
            if INDEX and self.done % 7 == 0:
                time.sleep(0.02)  # the other one is as far ahead as it can
            if asks and self.checkpoints.is_retry_due(self.done) and admits(self.done):
                self.save()
            self.events += self.checkpoints.poll()

    def save(self) -> None:
        self.saved.append(self.done)
        self.checkpoints.save(self.done, self.state, manifest={"step": self.done})

    def until(self, kind: type, admits=lambda done: True) -> None:
        """Steps until process 0 has met such an event."""
        for _ in range(500):
            self.steps(BLOCK, admits)
            if broadcast(any(isinstance(event, kind) for event in self.events)):
                self.checkpoints.wait()
                self.events += self.checkpoints.poll()
                return
        raise AssertionError(f"no {kind.__name__} in {self.done} steps: {self.events}")

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]

    def check(self, step: int) -> None:
        """The newest checkpoint is that of a step, bit by bit."""
        state, manifest = self.checkpoints.restore(None, LIKE)
        expected = INITIAL()
        for _ in range(step):
            expected, metrics = ADVANCE(expected)
            float(metrics)  # gloo does not get on with many steps in flight
        assert manifest == {"step": step}, manifest
        folders = {name for name in os.listdir(self.checkpoints.directory) if name[0] != "."}
        assert folders <= {str(one.step) for one in self.checkpoints.steps()} | {"old-4"}, folders  # no leavings
        for ours, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
            for a, b in zip(ours.addressable_shards, wanted.addressable_shards):
                np.testing.assert_array_equal(a.data, b.data)


def one_part_fails(process: int, at_once: bool) -> None:
    training = Training(f"part-{process}-{at_once}", SOON)
    training.steps(5)
    with failing(process, 1, at_once):
        training.save()
        training.until(Committed)
    first, again = training.saved
    assert first == 5
    assert again == broadcast(again) >= first + 4, again
    assert training.kinds() == ["Retrying", "Committed"], training.events
    retrying, committed = training.events
    assert (retrying.step, retrying.wait, retrying.number) == (5, 0.02, "2 of 3"), retrying
    who = f"process {process}: " if process else ""
    assert retrying.reason.startswith(f"{who}the disk is full"), retrying
    assert (committed.step, committed.tries) == (again, 2), committed
    training.check(again)
    training.checkpoints.close()


def all_hear_within_seconds_that(process_0_fails_at: str) -> None:
    training = Training(process_0_fails_at, SOON, timeout=300)
    training.steps(5)
    begun = time.monotonic()
    with failing_call(process_0_fails_at):
        training.save()
        training.checkpoints.wait()
    assert time.monotonic() - begun < 20
    training.until(Committed)
    assert training.kinds() == ["Retrying", "Committed"], training.events
    assert training.events[0].reason.startswith("the disk is full"), training.events
    training.check(training.saved[-1])
    training.checkpoints.close()


def it_is_given_up_once_and_the_last_save_is_made() -> None:
    training = Training("given-up", SOON)
    training.steps(3)
    training.save()
    training.steps(3)
    with failing(1, 100):
        training.save()
        training.until(SaveFailed)
        training.steps(BLOCK)
    assert training.kinds() == ["Committed", "Retrying", "Retrying", "SaveFailed"], training.events
    failed = training.events[-1]
    assert (failed.tries, failed.newest) == (3, 3), failed
    assert failed.step == training.saved[-1] == broadcast(failed.step)
    assert len(training.saved) == 4
    training.save()
    training.checkpoints.finish()
    (last,) = training.checkpoints.poll()
    assert isinstance(last, Committed), last
    assert last.tries == 1
    training.check(training.done)
    training.checkpoints.close()


def a_scheduled_save_takes_its_place(steps: int) -> None:
    """Process 0 has named a step, five after the one that failed."""
    training = Training(f"scheduled-{steps}", SOON)
    training.steps(2)
    with failing(0, 1):
        training.save()
        training.checkpoints.wait()
    time.sleep(2 * SOON[0])
    training.steps(steps - 1)
    training.steps(1, asks=False)
    training.save()
    training.steps(BLOCK)
    training.checkpoints.finish()
    training.events += training.checkpoints.poll()
    is_same = steps == 5
    assert training.kinds() == ["Retrying", *["SaveFailed"] * (not is_same), "Committed"], training.events
    assert training.saved == [2, 2 + steps]
    assert training.events[-1].tries == 1 + is_same
    training.check(2 + steps)
    training.checkpoints.close()


def a_rewind_takes_its_place() -> None:
    training = Training("rewound", LATER)
    training.steps(2)
    training.save()
    training.steps(2)
    with failing(1, 1):
        training.save()
        training.until(Retrying)
    training.checkpoints.rewind(2)
    training.state, _ = training.checkpoints.restore(None, LIKE)
    training.done, training.before = 2, None
    training.steps(2)
    training.save()
    training.checkpoints.finish()
    training.events += training.checkpoints.poll()
    assert training.kinds() == ["Committed", "Retrying", "SaveFailed", "Committed"], training.events
    assert training.events[-1].tries == 1
    training.check(4)
    training.checkpoints.close()


def bad_steps_are_passed() -> None:
    training, refused = Training("bad", SOON), []

    def admits(done: int) -> bool:
        refused.append(done)
        return len(refused) > 2

    training.steps(2)
    with failing(1, 1):
        training.save()
        training.until(Committed, admits)
    assert len(refused) == 3
    assert refused[-1] == training.saved[-1] == broadcast(refused[-1])
    training.check(refused[-1])
    training.steps(30)
    assert training.checkpoints.poll() == []
    training.checkpoints.close()


def the_last_save_is_tried_again_at_the_end() -> None:
    training = Training("last", SOON)
    training.steps(6)
    with failing(1, 1):
        training.save()
        training.checkpoints.finish()
    training.events += training.checkpoints.poll()
    assert training.kinds() == ["Retrying", "Committed"], training.events
    assert (training.events[1].step, training.events[1].tries) == (6, 2)
    training.check(6)
    with failing(1, 100):
        training.steps(1)
        training.save()
        training.checkpoints.finish()
    assert [type(event) for event in training.checkpoints.poll()] == [Retrying, Retrying, SaveFailed]
    assert training.checkpoints.latest() == 6
    training.checkpoints.close()


def a_copy_has_its_turn(tier: Path) -> None:
    training = Training("turn", SOON, durable=str(tier), durable_every=5)
    training.steps(5)
    with failing(1, 1):
        training.save()
        training.until(Copied)  # not by `finish`, which copies any
    assert broadcast((tier / str(training.saved[-1])).is_dir()), os.listdir(tier)
    training.checkpoints.close()


def process_0_cannot_list_the_folder() -> None:
    training, real = Training("unlisted", SOON), CheckpointStore.steps
    training.steps(2)
    if INDEX == 0:

        def steps(store):
            raise PermissionError(errno.EACCES, "denied")

        CheckpointStore.steps = steps
    training.save()
    CheckpointStore.steps = real
    training.until(Committed)
    assert training.kinds() == ["Retrying", "Committed"], training.events
    assert training.events[0].reason == "PermissionError: [Errno 13] denied", training.events[0]
    assert training.events[1].tries == 2
    training.check(training.saved[-1])
    training.checkpoints.close()


one_part_fails(1, at_once=False)
one_part_fails(0, at_once=True)
all_hear_within_seconds_that(process_0_fails_at="mkdir")  # nobody has a folder to write to
all_hear_within_seconds_that(process_0_fails_at="rename")  # all have written, and are merged
it_is_given_up_once_and_the_last_save_is_made()
a_scheduled_save_takes_its_place(steps=3)
a_scheduled_save_takes_its_place(steps=5)
a_rewind_takes_its_place()
bad_steps_are_passed()
the_last_save_is_tried_again_at_the_end()
a_copy_has_its_turn(PLACE / "tier")
process_0_cannot_list_the_folder()
print("all is well", flush=True)
