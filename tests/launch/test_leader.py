"""Decisions of the leader, with a fake clock and fake agents: no sockets, no processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxtrain.config import Config
from jaxtrain.launch.leader import KILL_TIMEOUT, SETTLE_TIME, Leader
from jaxtrain.launch.leadership.state import LeaderState
from jaxtrain.launch.types import Phase, Placement, RestartPolicy


@dataclass
class FakeJob:
    """Job that fits any number of processes in `fits`; a test sets its newest checkpoint."""

    fits: tuple[int, ...] = tuple(range(1, 100))
    step: int | None = None
    written: list[int] = field(default_factory=list)
    directory: Path = Path("/run")
    is_simulated: bool = True

    def largest_placement(self, available: int) -> Placement | None:
        count = max((n for n in self.fits if n <= available), default=0)
        return Placement(count, 2 * count, (), "data", Config()) if count else None

    def write_config(self, placement: Placement) -> None:
        self.written.append(placement.processes)

    def newest_checkpoint(self) -> int | None:
        return self.step


class World:
    """A leader, a clock, and nodes whose workers end when they are killed or asked to stop."""

    def __init__(self, job: FakeJob | None = None, **policy):
        self.now = 0.0
        self.job = job or FakeJob()
        self.leader = Leader(self.job, RestartPolicy(**policy), clock=lambda: self.now)
        self.ranks: dict[int, list[int]] = {}
        self.obeys_stop, self.obeys_kill = True, True
        self.sent: list[tuple[int, str]] = []

    def join(self, node: int, slots: int = 1, host: str = "") -> None:
        self.ranks[node] = []
        self.leader.node_joined(node, slots, host or f"host{node}", 1000 + node)
        self.settle()

    def exit(self, rank: int, code: int, is_ended_by_jax: bool = False) -> None:
        node = next(n for n, ranks in self.ranks.items() if rank in ranks)
        self.ranks[node].remove(rank)
        self.leader.worker_exited(node, self.leader.generation, rank, 100 + rank, code, is_ended_by_jax)
        if not self.ranks[node]:
            self.leader.node_idle(node, self.leader.generation, 2000 + node)
        self.settle()

    def lose(self, node: int) -> None:
        del self.ranks[node]
        self.leader.node_lost(node, "closed its connection")
        self.settle()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for node in self.ranks:
            if node in self.leader.pool.nodes:
                self.leader.heartbeat(node)
        self.leader.tick()
        self.settle()

    def settle(self) -> None:
        """Lets the agents obey the leader's messages."""
        while self.leader.outbox:
            node, kind, fields = self.leader.outbox.popleft()
            self.sent.append((node, kind))
            if node not in self.ranks:
                continue
            if kind == "start":
                self.ranks[node] = list(fields["ranks"])
                self.start = fields
            elif kind == "kill" and self.obeys_kill:
                self.end(node, -9)
            elif kind == "stop" and self.obeys_stop:
                self.job.step = (self.job.step or 0) + 1
                self.end(node, 75)

    def end(self, node: int, code: int) -> None:
        ranks, self.ranks[node] = self.ranks[node], []
        for rank in ranks:
            self.leader.worker_exited(node, self.leader.generation, rank, 100 + rank, code)
        if ranks:
            self.leader.node_idle(node, self.leader.generation, 3000 + node)

    def restart(self) -> None:
        """Another leader takes over; nobody has joined it yet."""
        saved = LeaderState.from_text(self.leader.saved_state().as_text())
        events, self.old = self.leader.events, self.leader
        self.leader = Leader(self.job, self.leader.policy, clock=lambda: self.now)
        self.leader.events = events
        self.leader.restore(saved)

    def rejoin(self, *nodes: int) -> None:
        for node in nodes:
            ranks, port = self.ranks[node], 4000 + node
            self.leader.node_joined(node, 1, f"host{node}", port, 0, self.old.generation, ranks)
            if not ranks:
                self.leader.node_idle(node, self.old.generation, port)
        self.settle()

    @property
    def lines(self) -> list[str]:
        return [event.line for event in self.leader.events]

    @property
    def records(self) -> list[dict]:
        return [event.record for event in self.leader.events if event.record]

    @property
    def causes(self) -> list[str]:
        return [record["cause"] for record in self.records if record["kind"] == "end"]

    @property
    def running(self) -> int:
        return sum(map(len, self.ranks.values()))


def test_it_waits_for_its_nodes_then_starts_with_fresh_addresses():
    world = World(nodes=2)
    world.join(1, slots=2)
    assert world.running == 0
    world.join(0, slots=2)
    assert world.ranks == {0: [0, 1], 1: [2, 3]}
    assert world.start["address"] == "host0:1000"
    assert world.start["processes"] == 4
    world.exit(3, -9)
    assert world.start["address"] == "host0:3000"  # a port told after the generation before
    assert world.leader.generation == 2


def test_nodes_that_do_not_come_are_done_without():
    world = World(nodes=3, join_timeout=60)
    world.join(0)
    world.wait(59)
    assert world.running == 0
    world.wait(2)
    assert world.running == 1
    assert "1 of 3 nodes joined within 60 s" in world.lines[0]


def test_nobody_comes():
    world = World(nodes=1, join_timeout=60)
    world.wait(61)
    assert world.leader.code == 1


def test_all_done():
    world = World(nodes=1)
    world.join(0, slots=2)
    world.exit(1, 0)
    assert world.leader.code is None
    world.exit(0, 0)
    assert world.leader.code == 0
    assert world.causes == ["finished"]
    assert world.sent[-1] == (0, "end")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-9, "process 2 (pid 102) was killed by signal 9"),
        (70, "process 2 (pid 102) was hung (exit code 70)"),
        (3, "process 2 (pid 102) failed with exit code 3"),
        (1, "process 2 (pid 102) failed with exit code 1"),
    ],
)
def test_a_lost_worker_ends_the_generation_and_the_next_starts_at_once(code, said):
    world = World(nodes=1)
    world.join(0, slots=4)
    world.exit(2, code)
    world.wait(SETTLE_TIME)
    assert world.causes == [said]
    assert world.leader.generation == 2
    assert world.running == 4
    assert [record["generation"] for record in world.records] == [1, 1, 2]


def test_a_victim_is_not_the_cause():
    world = World(nodes=1)
    world.join(0, slots=4)
    world.exit(0, 1)  # its collective failed, because
    world.exit(3, -9)  # this one was killed
    assert world.causes == ["process 3 (pid 103) was killed by signal 9"]


def test_who_did_not_answer_is_the_cause_when_jax_ends_the_others():
    world = World(nodes=1)
    world.join(0, slots=3)
    world.exit(0, -6, is_ended_by_jax=True)
    world.exit(2, -6, is_ended_by_jax=True)
    world.wait(SETTLE_TIME)
    assert world.causes == ["process 1 did not answer its peers, which JAX ended"]
    assert world.running == 3


def test_who_aborted_by_itself_is_the_cause_when_jax_ends_the_others():
    world = World(nodes=1)
    world.join(0, slots=3)
    world.exit(0, -6, is_ended_by_jax=True)
    world.exit(1, -6)
    assert world.causes == ["process 1 (pid 101) aborted (signal 6)"]
    assert world.running == 3


def test_bad_input_is_not_tried_again_in_the_first_generation():
    world = World(nodes=1)
    world.join(0, slots=2)
    world.exit(1, 2)
    assert world.leader.code == 2
    assert world.leader.generation == 1


def test_backoff_doubles_and_a_newer_checkpoint_resets_it():
    world = World(nodes=1, max_restarts=9, max_failures=99, backoff=1.0)
    world.join(0, slots=1)

    def delay() -> float:
        world.exit(0, -9)
        begun = world.now
        while world.running == 0:
            world.wait(0.5)
        return world.now - begun

    assert [delay() for _ in range(5)] == [0, 1, 2, 4, 8]
    world.job.step = 10
    assert [delay() for _ in range(2)] == [0, 1]
    world.job.step = 10  # no newer one
    assert delay() == 2


def test_restarts_without_progress_are_counted_and_the_code_is_passed_on():
    world = World(nodes=1, max_restarts=2, max_failures=99)
    world.join(0, slots=2)
    for _ in range(2):
        world.exit(1, -9)
        world.wait(60)
    world.exit(1, -11)
    assert world.leader.code == 139
    assert "2 restarts in a row" in world.lines[-1]


def test_a_slot_that_keeps_failing_is_left_out_and_a_spare_takes_its_place():
    world = World(nodes=1, spares=1, max_failures=2, max_restarts=9)
    world.join(0, slots=3)
    assert world.running == 2
    for _ in range(2):
        world.exit(1, -9)
        world.wait(60)
    assert any("slot 1 of node 0 is on the denylist after 2 failures" in line for line in world.lines)
    assert world.start["slots"] == [0, 2]
    for _ in range(2):
        world.exit(1, -9)
        world.wait(60)
    assert world.start["slots"] == [0]  # no spare is left
    world.job.step = 5
    world.exit(0, -9)
    assert world.start["slots"] == [0]  # progress does not bring a listed one back


def test_progress_forgives_a_slot():
    world = World(nodes=1, max_failures=2, max_restarts=9)
    world.join(0, slots=2)
    for step in range(1, 5):
        world.job.step = step
        world.exit(1, -9)
        world.wait(60)
    assert world.running == 2


def test_a_node_that_keeps_failing_is_left_out_whole_unless_it_is_the_only_one():
    world = World(nodes=2, max_failures=2, max_restarts=9)
    world.join(0, slots=2)
    world.join(1, slots=2)
    world.exit(2, -9)
    world.exit(3, -9)
    world.wait(60)
    assert any("node 1 is on the denylist" in line for line in world.lines)
    assert world.ranks == {0: [0, 1], 1: []}
    world.exit(0, -9)
    world.wait(60)
    world.exit(1, -9)
    world.wait(60)
    assert world.ranks[0] == [0, 1]


def test_shrink_and_grow():
    world = World(nodes=4, max_restarts=9)
    for node in range(4):
        world.join(node)
    world.lose(3)
    assert world.running == 3
    assert world.causes == ["node 3 (host3) is lost: it closed its connection"]
    world.lose(2)
    world.wait(2)
    assert world.running == 2
    world.join(2)
    assert "stop" in [kind for _, kind in world.sent]
    assert world.running == 3
    assert world.causes[-1] == "node 2 (host2) joined: continuing with 3 processes"
    world.join(3)
    assert world.job.written == [4, 3, 2, 3, 4]
    assert world.leader.generation == 5


def test_a_node_that_would_not_make_it_larger_does_not_stop_it():
    world = World(FakeJob(fits=(1, 2, 4)), nodes=2)
    world.join(0)
    world.join(1)
    world.join(2)
    assert world.leader.generation == 1
    world.join(3)
    assert world.job.written == [2, 4]


def test_what_does_not_fit_stays_idle_and_is_said():
    world = World(FakeJob(fits=(1, 2, 4)), nodes=1)
    world.join(0, slots=3)
    assert world.running == 2
    assert world.records[0]["idle"] == 1
    assert "1 process idle" in world.lines[0]


def test_on_too_few_nodes_for_any_mesh_it_waits_for_them_to_come_back():
    world = World(FakeJob(fits=(2,)), nodes=2, join_timeout=60)
    world.join(0)
    world.join(1)
    world.lose(1)
    assert world.leader.phase is Phase.WAITING
    assert "expected an axis of -1, or --fallback; waiting 60 s" in world.lines[-1]
    world.wait(59)
    world.join(1)
    assert world.job.written == [2, 2]
    world.lose(1)
    world.wait(2)
    world.wait(61)
    assert world.leader.code == 1


def test_silence_is_a_loss_and_words_are_signs_of_life():
    world = World(nodes=2, heartbeat=20)
    world.join(0)
    world.join(1)
    for _ in range(5):
        world.wait(15)
    assert world.leader.generation == 1
    world.now += 21
    world.leader.heartbeat(0)
    del world.ranks[1]
    world.leader.tick()
    world.settle()
    assert world.causes == ["node 1 (host1) is lost: it gave no sign of life for 20 s"]
    assert world.ranks == {0: [0]}


def test_a_node_that_does_not_get_rid_of_its_workers_is_lost():
    world = World(nodes=2)
    world.join(0)
    world.join(1)
    world.obeys_kill = False
    world.exit(0, -9)
    assert world.leader.phase is Phase.ENDING
    world.wait(KILL_TIMEOUT + 1)
    assert world.job.written == [2, 1]


def test_a_signal_saves_and_ends_the_job():
    world = World(nodes=1)
    world.join(0, slots=2)
    world.leader.signal_received(0, 15)
    world.settle()
    assert world.leader.code == 75
    assert world.causes == ["signal 15"]


def test_a_signal_before_the_workers_can_save():
    world = World(nodes=1)
    world.join(0, slots=2)
    world.obeys_stop = False
    world.leader.signal_received(0, 15)
    world.settle()
    world.exit(0, -15)
    assert world.leader.code == 75


def test_a_worker_lost_while_it_saves_is_not_called_saved():
    world = World(nodes=1)
    world.join(0, slots=2)
    world.obeys_stop = False
    world.leader.signal_received(0, 15)
    world.settle()
    world.exit(0, -9)
    assert world.leader.code == 137


def test_the_second_signal_ends_it_at_once_but_not_that_of_another_node():
    world = World(nodes=2)
    world.join(0)
    world.join(1)
    world.obeys_stop = False
    world.leader.signal_received(0, 15)
    world.leader.signal_received(1, 15)
    assert world.leader.code is None
    world.leader.signal_received(0, 15, is_repeated=True)
    assert world.leader.code == 143


def test_workers_that_stop_by_themselves_end_the_job_with_75():
    world = World(nodes=1)
    world.join(0, slots=2)
    world.exit(1, 75)
    world.exit(0, 75)
    assert world.leader.code == 75
    assert world.causes == ["a worker received a signal"]


def test_a_worker_that_does_not_follow_the_others_is_killed():
    world = World(nodes=1, stop_timeout=100)
    world.join(0, slots=2)
    world.exit(1, 75)
    world.wait(99)
    assert world.leader.generation == 1
    world.wait(2)
    assert world.causes == ["process 0 did not stop within 100 s"]
    assert world.leader.generation == 2


def test_a_stop_that_hangs_is_bounded():
    world = World(nodes=1, stop_timeout=100)
    world.join(0, slots=2)
    world.obeys_stop = False
    world.leader.signal_received(0, 15)
    world.settle()
    world.wait(101)
    assert world.leader.code == 1
    assert world.running == 0


def test_a_disk_that_takes_nothing_is_tried_again(monkeypatch):
    world = World(nodes=1)

    def full(placement):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(world.job, "write_config", full)
        world.join(0)
        assert world.running == 0
    world.wait(11)
    assert world.running == 1
    assert world.leader.generation == 1


def test_generations_go_on_counting_where_an_earlier_launch_ended():
    leader = Leader(FakeJob(), RestartPolicy(), generation=7, clock=lambda: 0.0)
    leader.node_joined(0, 1, "h", 1)
    assert leader.generation == 8
    assert leader.phase is Phase.RUNNING


def test_each_node_copies_to_its_own_memory_and_then_to_the_next_ones():
    leader, told = Leader(FakeJob(), RestartPolicy(nodes=4, memory_every=2), clock=lambda: 0.0), {}
    for node, port in ((2, 22), (0, 20), (3, 0), (1, 21)):  # node 3 has none
        leader.node_joined(node, 1, f"h{node}", 1000, port)
    while leader.outbox:
        node, kind, fields = leader.outbox.popleft()
        told[node] = fields
        assert (kind, fields["memory_every"]) == ("start", 2)
    assert [told[node]["memory_addresses"] for node in range(4)] == [
        ["h0:20", "h1:21", "h2:22"], ["h1:21", "h2:22", "h0:20"], ["h2:22", "h0:20", "h1:21"],
        ["h0:20", "h1:21", "h2:22"],
    ]  # fmt: skip


def test_a_newer_step_in_memory_is_progress_like_a_checkpoint():
    for kept, generations in ((lambda n: n, 12), (lambda n: -1, 3), (lambda n: 5, 3)):
        world = World(max_restarts=2, max_failures=100, backoff=1.0)
        world.join(0)
        for number in range(11):
            if world.leader.phase is Phase.OVER:
                break
            world.ranks[0] = []
            world.leader.worker_exited(0, world.leader.generation, 0, 1, -9)
            world.leader.node_idle(0, world.leader.generation, 1, kept(number))
            world.settle()
            world.wait(100)
        assert world.leader.generation == generations


def three() -> World:
    world = World(nodes=3, heartbeat=20.0)
    for node in range(3):
        world.join(node)
    assert world.running == 3
    return world


def test_a_new_leader_adopts_the_generation_once_all_its_nodes_are_there():
    world = three()
    world.now = 50.0
    world.restart()
    sent = len(world.sent)
    world.rejoin(2, 0)
    assert world.leader.phase is Phase.ADOPTING
    world.rejoin(1)
    assert world.leader.phase is Phase.RUNNING
    assert world.sent[sent:] == []
    assert world.records[-1] == {"kind": "adopted", "generation": 1, "processes": 3}
    world.exit(1, -9)
    assert world.running == 3
    assert world.leader.generation == 2
    assert world.records[-2]["seconds"] == pytest.approx(50.0, abs=1)  # of the generation, not of its second leader


def test_exits_that_a_new_leader_hears_before_it_has_adopted_the_generation_count():
    world = three()
    world.restart()
    world.ranks[0] = []
    world.rejoin(0)
    world.leader.worker_exited(0, 1, 0, 77, -9)
    world.rejoin(1, 2)
    assert world.causes == ["process 0 (pid 77) was killed by signal 9"]
    assert (world.leader.generation, world.running) == (2, 3)


def test_a_node_that_a_new_leader_never_hears_of_is_lost():
    world = three()
    world.restart()
    del world.ranks[2]
    world.rejoin(0, 1)
    world.wait(20.1)
    assert world.causes == ["node 2 is lost: it did not join the new leader within 20 s"]
    assert (world.leader.generation, world.running) == (2, 2)


def test_a_node_whose_agent_was_started_again_has_no_workers_to_adopt():
    world = three()
    world.restart()
    world.rejoin(0, 1)
    world.ranks[2] = []
    world.leader.node_joined(2, 1, "host2", 5000)
    world.settle()
    assert world.causes == ["node 2 (host2) joined the new leader without its workers"]
    assert (world.leader.generation, world.running) == (2, 3)


def test_a_stop_that_was_asked_for_is_carried_on_and_one_that_comes_meanwhile_is_obeyed():
    for is_before in (True, False):
        world = three()
        world.obeys_stop = False
        if is_before:
            world.leader.signal_received(0, 15)
            world.settle()
        world.restart()
        world.obeys_stop = True
        world.rejoin(0)
        if not is_before:
            world.leader.signal_received(0, 15)
        world.rejoin(1, 2)
        assert (world.leader.phase, world.leader.code) == (Phase.OVER, 75)
        assert world.causes == ["node 0 received signal 15" if is_before else "signal 15"]


@pytest.mark.parametrize("successors", [0, 1, 2])
def test_a_generation_that_was_being_ended_is_ended_for_its_own_cause(successors: int):
    """The last leader follows others that had not adopted it yet."""
    world = three()
    world.obeys_kill = False
    world.exit(1, -11)
    assert world.leader.phase is Phase.ENDING
    for _ in range(successors):
        world.restart()
        world.rejoin(0)
    world.restart()
    world.obeys_kill = True
    world.rejoin(0, 1, 2)
    assert world.causes == ["process 1 (pid 101) was killed by signal 11"]
    assert (world.leader.generation, world.running) == (2, 3)


def test_what_a_leader_counted_is_not_forgotten_and_the_end_is_not_taken_back():
    world = World(nodes=1, max_failures=2, max_restarts=3, backoff=5.0)
    world.join(0, slots=2)
    for _ in range(2):
        world.exit(1, 1)
        world.wait(SETTLE_TIME + 0.1)
        world.wait(6.0)
    assert world.running == 1  # slot 1 is on the denylist
    world.exit(0, -9)
    assert world.leader.phase is Phase.PAUSED
    world.restart()
    world.leader.node_joined(0, 2, "host0", 5000, 0, world.old.generation)
    world.wait(21.0)
    assert world.running == 1
    world.exit(0, -9)
    assert (world.leader.phase, world.leader.code) == (Phase.OVER, 137)
    world.restart()
    assert (world.leader.phase, world.leader.code) == (Phase.OVER, 137)


def test_a_leader_that_knows_of_no_generation_ends_the_one_that_it_meets_and_counts_on():
    world = World(nodes=2)
    world.ranks = {0: [0], 1: [1]}
    world.leader.node_joined(0, 1, "host0", 1, 0, 7, [0])
    world.leader.node_joined(1, 1, "host1", 1, 0, 7, [1])
    assert [(kind, fields.get("generation")) for _, kind, fields in world.leader.outbox] == [
        ("kill", 7), ("kill", 7), ("start", 8), ("start", 8),
    ]  # fmt: skip


def test_a_node_that_comes_during_the_adoption_enlarges_the_job_after_it():
    world = three()
    world.restart()
    world.ranks[3], world.old.generation = [], 1
    world.leader.node_joined(3, 1, "host3", 5000, 0, 0, ())
    world.rejoin(0, 1, 2)
    assert (world.leader.generation, world.running) == (2, 4)


def test_workers_of_another_generation_are_ended_also_during_the_adoption():
    world = three()
    world.restart()
    world.ranks[3] = [7]
    world.leader.node_joined(3, 1, "host3", 5000, 0, 9, [7])
    assert (3, "kill", {"generation": 9}) in world.leader.outbox


def test_spares_are_held_back_of_what_once_was_there():
    world = World(nodes=3, spares=1)
    for node in range(3):
        world.join(node)
    assert world.running == 2
    world.lose(1)
    assert world.running == 2
    world.restart()
    world.rejoin(0, 2)
    world.exit(0, -9)
    world.wait(2.0)  # the pause before a second restart
    assert world.running == 2


def test_a_job_of_which_all_was_killed_while_it_stopped_begins_again():
    world = three()
    world.obeys_stop = False
    world.leader.signal_received(0, 15)
    world.settle()
    world.restart()
    world.obeys_stop = True
    for node in range(3):  # agents of the same command line, started again
        world.ranks[node] = []
        world.leader.node_joined(node, 1, f"host{node}", 5000)
    world.settle()
    assert (world.leader.phase, world.leader.generation, world.running) == (Phase.RUNNING, 2, 3)
    assert world.leader.code is None
