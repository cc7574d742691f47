"""Agreement of a job's processes: every order of events of a small job, on the transactions that the launcher uses.

Two nodes may lead; each runs an agent with at most one worker. A lease may end at any time without its leader knowing,
messages may arrive at any later time or not at all, and every process may pause between any two requests to the store.
All reachable states are visited. A generation is one worker on one of the nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from memory_store import MemoryStore

from jaxtrain.distributed.job_store import DeposedError, FencedError, JobStore
from jaxtrain.distributed.store_types import Put
from jaxtrain.errors import ProtocolError
from jaxtrain.launch.protocol import check_revision


@dataclass(frozen=True)
class Candidate:
    """Leader process: its leadership, and the newest generation that it knows of; None before it has read that.

    `after` is the revision of the state that it has read or saved last.
    """

    lease: int = 0
    revision: int = 0
    generation: int | None = None
    after: int = 0


@dataclass(frozen=True)
class Work:
    """Worker of a generation; `newest`: the newest save that it has read or written, None before it has read it."""

    generation: int
    fence: int
    newest: int | None = None


@dataclass(frozen=True)
class World:
    """State of everything. `sent`: messages on their way, in order for each (leadership, node)."""

    store: tuple
    candidates: tuple[Candidate, ...] = (Candidate(), Candidate())
    sent: tuple[tuple[int, int, tuple[str, int, int]], ...] = ()
    revisions: tuple[int, ...] = (0, 0)  # by agent
    workers: tuple[Work | None, ...] = (None, None)
    leaderships: int = 0


def put(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


class Broken(AssertionError):
    """A promise does not hold."""


class Explorer:
    """Visits all states. `jobs_class` may be a broken form of `JobStore`, `check` one of `check_revision`.

    Bounds: the numbers of leaderships, generations and saved steps.
    """

    def __init__(self, jobs_class: type[JobStore] = JobStore, check=check_revision, bounds=(2, 2, 2)) -> None:
        self.jobs_class, self.check = jobs_class, check
        self.leaderships, self.generations, self.saves = bounds

    def run(self) -> int:
        """Returns the number of states. Raises Broken."""
        start = World(MemoryStore().snapshot())
        seen, stack = {start}, [start]
        while stack:
            for world in self.next_worlds(stack.pop()):
                if world not in seen:
                    seen.add(world)
                    stack.append(world)
        return len(seen)

    def next_worlds(self, world: World) -> Iterator[World]:
        for index in range(2):
            yield from self.candidate_acts(world, index)
            yield from self.worker_acts(world, index)
        for lease in world.store[2]:
            store = MemoryStore.restored(world.store)
            store.revoke_lease(lease)
            yield replace(world, store=store.snapshot())
        for position in range(len(world.sent)):
            yield from self.deliver(world, position)

    def open(self, world: World) -> tuple[MemoryStore, JobStore]:
        store = MemoryStore.restored(world.store)
        return store, self.jobs_class(store, "/job")

    def candidate_acts(self, world: World, index: int) -> Iterator[World]:
        me = world.candidates[index]
        store, jobs = self.open(world)
        if not me.revision:
            if world.leaderships < self.leaderships:
                lease = store.grant_lease(1)
                revision = jobs.lead("host", index, lease)
                if revision is not None:
                    leads = put(world.candidates, index, Candidate(lease, revision))
                    yield replace(world, store=store.snapshot(), candidates=leads, leaderships=world.leaderships + 1)
            return
        resigned = put(world.candidates, index, Candidate())
        yield replace(world, candidates=resigned)  # it has noticed that it is deposed, or was started again
        if me.generation is None:
            read = replace(me, generation=jobs.generation()[0], after=jobs.load_state()[1])
            yield replace(world, candidates=put(world.candidates, index, read))
            return
        if me.generation < self.generations:
            yield from self.begin(world, index, me)

    def begin(self, world: World, index: int, me: Candidate) -> Iterator[World]:
        """The next generation begins, on either node; the other one is told to end its worker."""
        assert me.generation is not None
        store, jobs = self.open(world)
        before, generation = jobs.generation()[0], me.generation + 1
        try:
            fence = jobs.begin_generation(me.revision, me.after, generation, f"of {me.revision}: {generation}")
        except DeposedError:
            yield replace(world, candidates=put(world.candidates, index, Candidate()))
            return
        if generation != before + 1:
            raise Broken(f"generation {generation} follows {before}")
        leads = put(world.candidates, index, replace(me, generation=generation, after=fence))
        for node in range(2):
            kill = (me.revision, 1 - node, ("kill", generation - 1, 0))
            start = (me.revision, node, ("start", generation, fence))
            yield replace(world, store=store.snapshot(), candidates=leads, sent=(*world.sent, kill, start))

    def deliver(self, world: World, position: int) -> Iterator[World]:
        revision, node, (kind, generation, fence) = world.sent[position]
        if any(sent[:2] == (revision, node) for sent in world.sent[:position]):
            return  # one connection keeps the order
        left = (*world.sent[:position], *world.sent[position + 1 :])
        try:
            newest = self.check({"kind": kind, "revision": revision}, world.revisions[node])
        except ProtocolError:
            return
        worker = world.workers[node]
        if kind == "start":
            if worker is not None and worker.generation > generation:
                raise Broken(f"generation {generation} is started on a node that runs {worker.generation}")
            worker = Work(generation, fence)
        elif worker is not None and worker.generation <= generation:
            worker = None
        revisions = put(world.revisions, node, newest)
        yield replace(world, sent=left, revisions=revisions, workers=put(world.workers, node, worker))

    def worker_acts(self, world: World, node: int) -> Iterator[World]:
        """A worker reads the newest save when it begins, then saves one step after the other."""
        worker = world.workers[node]
        if worker is None:
            return
        store, jobs = self.open(world)
        saved = jobs.last_save()
        newest = 0 if saved is None else saved[0]
        if worker.newest is None:
            yield replace(world, workers=put(world.workers, node, replace(worker, newest=newest)))
            return
        if worker.newest >= self.saves:
            return
        step, current = worker.newest + 1, jobs.generation()[0]
        try:
            jobs.record_save(worker.fence, step, f"{step}.generation-{worker.generation}")
        except FencedError:
            yield replace(world, workers=put(world.workers, node, None))
            return
        if worker.generation != current:
            raise Broken(f"generation {worker.generation} saves although {current} has begun")
        if newest != worker.newest:
            raise Broken(f"a save of step {newest} is lost by a generation that began at {worker.newest}")
        yield replace(world, store=store.snapshot(), workers=put(world.workers, node, replace(worker, newest=step)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bounds", [(3, 2, 2), (2, 3, 1)])
def test_no_order_of_events_loses_a_save_or_lets_a_deposed_leader_act(bounds: tuple[int, int, int]):
    assert Explorer(bounds=bounds).run() > 50_000


class SavesWithoutFence(JobStore):
    def record_save(self, fence: int, step: int, folder: str) -> None:
        self.store.transact([], [Put(f"{self.prefix}/saved", f'[{step}, "{folder}"]')])


class BeginsWithoutLeading(JobStore):
    def _put_as_leader(self, revision: int, after: int, *puts: Put) -> int:
        written = self.store.transact([], puts)
        assert written is not None
        return written


class BeginsWhileAnyoneLeads(JobStore):
    def _put_as_leader(self, revision: int, after: int, *puts: Put) -> int:
        leader, (_, after) = self.store.get(f"{self.prefix}/leader"), self.load_state()
        return super()._put_as_leader(revision if leader is None else leader.create_revision, after, *puts)


@pytest.mark.parametrize("broken", [SavesWithoutFence, BeginsWithoutLeading, BeginsWhileAnyoneLeads])
def test_a_protocol_without_one_of_its_comparisons_is_found_out(broken: type[JobStore]):
    with pytest.raises(Broken):
        Explorer(broken).run()


def test_agents_that_obey_deposed_leaders_are_found_out():
    with pytest.raises(Broken):
        Explorer(check=lambda message, newest: message["revision"]).run()


def test_a_request_that_a_member_carries_out_late_a_second_time_has_no_effect():
    """The leader has sent it again to another member, and gone on."""
    store = MemoryStore()
    jobs = JobStore(store, "/job")
    revision = jobs.lead("host", 1, store.grant_lease(1))
    assert revision is not None
    first = jobs.begin_generation(revision, 0, 1, "state 1")
    assert jobs.begin_generation(revision, 0, 1, "state 1") == first  # its answer was lost
    second = jobs.begin_generation(revision, first, 2, "state 2")
    with pytest.raises(DeposedError):
        jobs.begin_generation(revision, 0, 1, "state 1")
    assert jobs.generation() == (2, second)
    jobs.record_save(second, 5, "5.generation-2")
    assert jobs.save_state(revision, second, "state 3") > second
    assert jobs.load_state()[0] == "state 3"
    assert jobs.last_save() == (5, "5.generation-2")
