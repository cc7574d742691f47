"""Decisions of the launcher, without sockets or processes.

Each public method is an event that the leader reacts to. It only decides: `outbox` collects messages for the agents,
`events` lines and records to write.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from jaxtrain.exit_codes import SAVED, USAGE
from jaxtrain.launch.exit_reasons import cause_rank, describe_exit, is_clean_exit, shell_exit_code
from jaxtrain.launch.job import ElasticJob
from jaxtrain.launch.leadership.state import LeaderState
from jaxtrain.launch.node_pool import ConnectedNode, Denylist, NodePool, Slot
from jaxtrain.launch.types import FailureCause, LaunchEvent, Phase, Placement, RestartPolicy

SETTLE_TIME = 0.5  # seconds to wait for the exit that caused another one
KILL_TIMEOUT = 60.0  # seconds in which a node must have ended its killed workers
MAX_BACKOFF = 60.0  # seconds
DISK_RETRY = 10.0  # seconds until a failed write of the config is tried again


class Leader:
    """Numbers the generations, and decides when one ends and which slots the next one uses."""

    def __init__(
        self,
        job: ElasticJob,
        policy: RestartPolicy,
        *,
        generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the leader.

        Args:
            job: the run to launch.
            policy: timeouts and limits.
            generation: number of the last generation of an earlier launch of this run.
            clock: returns seconds.
        """
        self.job, self.policy, self._clock = job, policy, clock
        self.pool = NodePool(Denylist(policy.max_failures), policy.spares)
        self.outbox: deque[tuple[int, str, dict[str, Any]]] = deque()
        self.events: deque[LaunchEvent] = deque()
        self.phase, self.code = Phase.WAITING, None
        self.generation = self._first_generation = generation
        self._deadline, self._next_look = clock() + policy.join_timeout, 0.0
        self._members: list[Slot] = []  # by rank
        self._exit_codes: dict[int, int] = {}  # by rank
        self._cause: FailureCause | None = None
        self._stop_reason: str | None = None  # reason of a requested clean stop
        self._signal: int | None = None  # signal that asked the job to stop
        self._early_exits: list[tuple[int, int, int, int, int, bool]] = []  # while the generation is being adopted
        self._adopted_phase = Phase.RUNNING
        self._restarts, self._start_time, self._start_checkpoint = 0, 0.0, None
        self._memory_step, self._start_step = -1, -1  # newest step in memory; newest of all at the generation's start

    def saved_state(self) -> LeaderState:
        """Returns what another leader needs to go on from here."""
        phase = self._adopted_phase if self.phase is Phase.ADOPTING else self.phase
        cause = self._cause and [self._cause.text, self._cause.code, self._cause.slot]
        return LeaderState(
            time.time(), phase.name, self.code, self.generation, self._first_generation,
            [list(slot) for slot in self._members], cause, self._stop_reason, self._signal, self._restarts,
            time.time() - (self._clock() - self._start_time), self._start_checkpoint, self._start_step,
            self._memory_step, self.pool.most_slots, self.pool.denylist.as_json(),
        )  # fmt: skip

    def restore(self, saved: LeaderState) -> None:
        """Goes on from the state of another leader. A generation that ran is adopted once its nodes have joined."""
        self.generation, self._first_generation = saved.generation, saved.first_generation
        self._members = [Slot(*slot) for slot in saved.members]
        if saved.cause and saved.phase in (Phase.ENDING.name, Phase.PAUSED.name, Phase.WAITING.name):
            text, code, slot = saved.cause
            self._cause = FailureCause(text, code, slot and Slot(*slot))
        self._stop_reason, self._signal, self._restarts = saved.stop_reason, saved.signal, saved.restarts
        self._start_time = self._clock() - max(time.time(), saved.time) + saved.start_time  # a clock may go back
        self._start_checkpoint, self._start_step = saved.start_checkpoint, saved.start_step
        self._memory_step, self.code, self.pool.most_slots = saved.memory_step, saved.code, saved.most_slots
        self.pool.denylist.restore(saved.denylist)
        phase = Phase[saved.phase]
        if phase is Phase.OVER:
            self.phase, self._deadline = phase, float("inf")
        elif phase is Phase.PAUSED:
            self.phase, self._deadline = phase, self._clock() + self.policy.heartbeat
        elif phase is not Phase.WAITING:
            self.phase, self._adopted_phase = Phase.ADOPTING, phase
            self._deadline = self._clock() + self.policy.heartbeat
            self._report(f"a new leader waits for the nodes of generation {self.generation}")

    # Events

    def node_joined(
        self, number: int, slots: int, host: str, port: int, memory_port: int = 0, generation: int = 0,
        ranks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Handles a node that joined; asks a generation that it would enlarge to stop.

        Args:
            number: index of the node.
            slots: number of workers that it can run.
            host: its address for other nodes.
            port: free port for the next JAX coordinator.
            memory_port: port of its in-memory checkpoints; 0 for none.
            generation: the last one that was started there; 0 for none.
            ranks: its workers that run.
        """
        node = ConnectedNode(number, host, slots, port, memory_port, self._clock())
        self.pool.add(node)
        if self.phase is Phase.ADOPTING:
            self._adopt_node(node, generation, ranks)
            return
        if ranks:  # of a generation that was given up
            self._send(number, "kill", generation=generation)
        self.generation = max(self.generation, generation)
        if self.phase is Phase.RUNNING:
            self._enlarge(node)
        elif self.phase is Phase.WAITING:
            is_complete = len(self.pool.nodes) >= self.policy.nodes
            if is_complete or (self._members and self.job.largest_placement(len(self.pool.usable_slots())) is not None):
                self._start_generation()

    def heartbeat(self, number: int) -> None:
        """Handles a sign of life of a node."""
        self.pool.nodes[number].last_seen = self._clock()

    def node_lost(self, number: int, why: str) -> None:
        """Handles a node that is gone or unreachable."""
        node = self.pool.nodes.pop(number, None)
        if node is None or self.phase is Phase.OVER:
            return
        self._send(number, "kill", generation=self.generation)
        if self.phase in (Phase.RUNNING, Phase.STOPPING) and any(slot.node == number for slot in self._members):
            self._kill_generation(FailureCause(f"{node} is lost: it {why}", 1))
        else:
            self._report(f"{node} is lost: it {why}")
        self._finish_if_idle()

    def worker_exited(
        self, number: int, generation: int, rank: int, pid: int, code: int, is_ended_by_jax: bool = False
    ) -> None:
        """Handles the exit of a worker of node `number`; `is_ended_by_jax`: because another worker was lost."""
        if self.phase is Phase.ADOPTING:
            self._early_exits.append((number, generation, rank, pid, code, is_ended_by_jax))
            return
        is_current = generation == self.generation and self.phase in (Phase.RUNNING, Phase.STOPPING)
        if not is_current or not 0 <= rank < len(self._members) or self._members[rank].node != number:
            return
        self._exit_codes[rank] = code
        if is_clean_exit(code):
            if len(self._exit_codes) == 1:
                self._deadline = self._clock() + self.policy.stop_timeout
            return
        cause = FailureCause(f"process {rank} (pid {pid}) {describe_exit(code)}", code, self._members[rank])
        if cause_rank(code, is_ended_by_jax) == 0:
            self._kill_generation(cause)
        elif self._cause is None:
            self._cause, self._deadline = cause, self._clock() + SETTLE_TIME

    def node_idle(self, number: int, generation: int, port: int, memory_step: int = -1) -> None:
        """Handles a node without running workers; `memory_step` is the newest step in its memory."""
        node = self.pool.nodes[number]
        node.port, self._memory_step = port, max(self._memory_step, memory_step)
        if generation == self.generation:
            node.is_idle = True
            self._finish_if_idle()

    def signal_received(self, number: int, received: int, is_repeated: bool = False) -> None:
        """Handles a signal to an agent: all workers save and the job ends; after a repeated one it ends at once."""
        self._signal = received
        reason = f"node {number} received signal {received}" if self.policy.nodes > 1 else f"signal {received}"
        if is_repeated and self.phase is not Phase.OVER:
            if self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDING, Phase.ADOPTING):
                self._record_end(f"{reason} for the second time", 128 + received)
            self._end_job(128 + received)
        elif self.phase is Phase.RUNNING:
            self._stop_workers(reason)
        elif self.phase in (Phase.WAITING, Phase.PAUSED):
            self._end_job(SAVED, f"stopped by {reason}")

    def tick(self) -> None:
        """Handles deadlines that have passed."""
        now = self._clock()
        if now >= self._next_look:  # at all nodes, of which there may be thousands
            self._next_look = now + self.policy.heartbeat / 64
            for node in list(self.pool.nodes.values()):
                if now - node.last_seen > self.policy.heartbeat:
                    self.node_lost(node.number, f"gave no sign of life for {self.policy.heartbeat:g} s")
        if self.phase is Phase.OVER or now < self._deadline:
            return
        if self.phase is Phase.WAITING:
            self._join_timed_out()
        elif self.phase is Phase.PAUSED:
            self._start_generation()
        elif self.phase is Phase.ADOPTING:
            self._finish_adoption()
        elif self.phase is Phase.ENDING:
            for node in [node for node in self.pool.nodes.values() if not node.is_idle]:
                self.node_lost(node.number, f"did not end its killed workers within {KILL_TIMEOUT:g} s")
        else:
            self._exits_timed_out()

    def seconds_to_deadline(self) -> float:
        """Returns the seconds until the next deadline, at least 0."""
        return max(0.0, self._deadline - self._clock())

    # Reactions

    def _begin_again(self) -> None:
        """Forgets an earlier job, of which everything was killed: no agent has started a generation yet."""
        self._members, self._exit_codes, self._early_exits, self._cause = [], {}, [], None
        self._stop_reason, self._signal, self._restarts, self._first_generation = None, None, 0, self.generation
        self.pool.denylist.restore(Denylist(0).as_json())
        self.phase, self._deadline = Phase.WAITING, self._clock() + self.policy.join_timeout
        if len(self.pool.nodes) >= self.policy.nodes:
            self._start_generation()

    def _enlarge(self, node: ConnectedNode) -> None:
        """Asks a generation to stop that a node which joined would enlarge."""
        placement = self.job.largest_placement(len(self.pool.usable_slots()))
        count = 0 if placement is None else placement.processes
        if count > len(self._members) and not self._exit_codes and self._cause is None:
            self._stop_workers(f"{node} joined: continuing with {_processes(count)}")

    def _adopt_node(self, node: ConnectedNode, generation: int, ranks: Sequence[int]) -> None:
        """Handles a node that joins a new leader, which adopts the generation once the last one is there."""
        node.runs_generation = generation
        if ranks and generation != self.generation:
            self._send(node.number, "kill", generation=generation)
        node.is_idle = not any(slot.node == node.number for slot in self._members)
        if all(slot.node in self.pool.nodes for slot in self._members):
            self._finish_adoption()

    def _finish_adoption(self) -> None:
        """Goes on with the generation of another leader, or ends it if one of its nodes is gone or was restarted."""
        if not any(node.runs_generation for node in self.pool.nodes.values()):
            self._begin_again()
            return
        self.phase, self._deadline = self._adopted_phase, float("inf")
        missing = sorted({slot.node for slot in self._members} - self.pool.nodes.keys())
        present = (self.pool.nodes[slot.node] for slot in self._members if slot.node in self.pool.nodes)
        restarted = [node for node in present if node.runs_generation != self.generation]
        for node in restarted:
            node.is_idle = True
        if self.phase is Phase.ENDING and self._cause is not None:
            self._kill_generation(self._cause)
        elif missing:
            text = f"node {missing[0]} is lost: it did not join the new leader within {self.policy.heartbeat:g} s"
            self._kill_generation(FailureCause(text, 1))
        elif restarted:
            self._kill_generation(FailureCause(f"{restarted[0]} joined the new leader without its workers", 1))
        else:
            record = {"kind": "adopted", "generation": self.generation, "processes": len(self._members)}
            self.events.append(LaunchEvent(f"generation {self.generation} goes on under a new leader", record))
            if self._signal is not None or self.phase is Phase.STOPPING:
                self._stop_workers(self._stop_reason or f"signal {self._signal}")
            elif newcomers := self.pool.nodes.keys() - {slot.node for slot in self._members}:
                self._enlarge(self.pool.nodes[min(newcomers)])
        early, self._early_exits = self._early_exits, []
        for exited in early:
            self.worker_exited(*exited)
        self._finish_if_idle()

    def _join_timed_out(self) -> None:
        count = len(self.pool.nodes)
        joined = f"{count} of {self.policy.nodes} nodes joined within {self.policy.join_timeout:g} s"
        if count == 0:
            self._end_job(1, f"{joined}; expected at least 1")
            return
        self._report(f"{joined}: starting without the others")
        self._start_generation(may_wait=False)

    def _exits_timed_out(self) -> None:
        """Kills the generation: no primary cause appeared in time, or some workers did not follow the first exit."""
        late = [rank for rank in range(len(self._members)) if rank not in self._exit_codes]
        if self._cause is not None:
            if self._cause.code == -signal.SIGABRT and len(late) == 1:  # JAX ended all others because of this one
                text = f"process {late[0]} did not answer its peers, which JAX ended"
                self._cause = FailureCause(text, -signal.SIGABRT, self._members[late[0]])
            self._kill_generation(self._cause)
            return
        ranks = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
        text = f"process {ranks} did not stop within {self.policy.stop_timeout:g} s"
        self._kill_generation(FailureCause(text, 1, self._members[late[0]] if late else None))

    def _start_generation(self, may_wait: bool = True) -> None:
        """Starts the next generation on the usable slots. If no mesh fits them, waits once for lost nodes."""
        slots = self.pool.usable_slots()
        placement = self.job.largest_placement(len(slots))
        if placement is None:
            self._no_mesh_fits(len(slots), may_wait)
            return
        try:
            self.job.write_config(placement)
        except OSError as error:  # somebody may empty a full disk
            self._report(f"the config cannot be written ({error.strerror or error}); retrying in {DISK_RETRY:g} s")
            self.phase, self._deadline = Phase.PAUSED, self._clock() + DISK_RETRY
            return
        self.generation += 1
        self._members, idle = slots[: placement.processes], len(slots) - placement.processes
        self._exit_codes, self._cause, self._stop_reason = {}, None, None
        self._start_time, self._start_checkpoint = self._clock(), self.job.newest_checkpoint()
        self._start_step = self._newest_step()
        self.phase, self._deadline = Phase.RUNNING, float("inf")
        address = self.pool.nodes[self._members[0].node].coordinator
        for node in self.pool.nodes.values():
            ranks = [rank for rank, slot in enumerate(self._members) if slot.node == node.number]
            node.is_idle = not ranks
            if ranks:
                self._send(
                    node.number, "start", generation=self.generation, run=str(self.job.directory), address=address,
                    processes=placement.processes, devices_per_process=placement.devices // placement.processes,
                    is_simulated=self.job.is_simulated, memory_every=self.policy.memory_every,
                    memory_addresses=self.pool.memory_ring(node),
                    slots=[self._members[rank].index for rank in ranks], ranks=ranks,
                )  # fmt: skip
        self._record_start(placement, idle)

    def _newest_step(self) -> int:
        """Returns the newest step that would survive a failure now; -1 for none."""
        checkpoint = self.job.newest_checkpoint()
        return max(-1 if checkpoint is None else checkpoint, self._memory_step)

    def _no_mesh_fits(self, slots: int, may_wait: bool) -> None:
        text = f"the mesh fits no number of processes up to {slots}; expected an axis of -1, or --fallback"
        if may_wait and len(self.pool.nodes) < self.policy.nodes:
            self._report(f"{text}; waiting {self.policy.join_timeout:g} s for nodes")
            self.phase, self._deadline = Phase.WAITING, self._clock() + self.policy.join_timeout
        else:
            code = shell_exit_code(self._cause.code) if self._cause else 1
            self._end_job(code, text if slots else "no usable slot is left")

    def _stop_workers(self, reason: str) -> None:
        """Asks the workers to save and exit."""
        self.phase, self._stop_reason = Phase.STOPPING, reason
        self._deadline = self._clock() + self.policy.stop_timeout
        self._report(f"{reason}; saving")
        for number in self.pool.nodes:
            self._send(number, "stop", generation=self.generation)

    def _kill_generation(self, cause: FailureCause) -> None:
        """Ends the generation at once."""
        self._cause = cause
        self.phase, self._deadline = Phase.ENDING, self._clock() + KILL_TIMEOUT
        for number in self.pool.nodes:
            self._send(number, "kill", generation=self.generation)
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        """Finishes the generation when none of its workers is left."""
        is_active = self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDING)
        if not is_active or not all(node.is_idle for node in self.pool.nodes.values()):
            return
        if self._newest_step() > self._start_step:
            self._restarts = 0
            self.pool.denylist.reset_counts()
        if self._cause is None:
            self._finish_clean()
        else:
            self._finish_failed(self._cause)

    def _finish_clean(self) -> None:
        """Ends the job, or starts the next generation, after all workers exited cleanly."""
        is_done = all(code == 0 for code in self._exit_codes.values())
        reason = "finished" if is_done else self._stop_reason or "a worker received a signal"
        self._record_end(reason, 0 if is_done else SAVED)
        if is_done:
            self._end_job(0)
        elif self._stop_reason is None or self._signal is not None:
            self._end_job(SAVED)
        else:
            self._start_generation()

    def _finish_failed(self, cause: FailureCause) -> None:
        """Ends the job, or starts the next generation, after a worker or node failed."""
        was_starting = self._stop_reason is not None and cause.code == -signal.SIGTERM  # stopped before it could save
        text = self._stop_reason if was_starting and self._stop_reason else cause.text
        self._record_end(text, shell_exit_code(cause.code))
        if self._signal is not None:
            self._end_job(SAVED if was_starting else shell_exit_code(cause.code))
        elif was_starting:
            self._start_generation()
        elif cause.code == USAGE and self.generation == self._first_generation + 1:
            self._end_job(USAGE)
        else:
            self._restart(cause)

    def _restart(self, cause: FailureCause) -> None:
        """Starts the next generation after a back-off, or ends the job after too many restarts."""
        denied = self.pool.denylist.record_failure(cause.slot, self.pool.nodes) if cause.slot else None
        if denied:
            failures = f"{self.policy.max_failures} failures in a row without a checkpoint"
            self._report(f"{denied} is on the denylist after {failures}")
        self._restarts += 1
        if self._restarts > self.policy.max_restarts:
            text = f"gave up after {self.policy.max_restarts} restarts in a row without a newer checkpoint"
            self._end_job(shell_exit_code(cause.code), text if self.policy.max_restarts else None)
            return
        wait = 0.0 if self._restarts == 1 else min(MAX_BACKOFF, self.policy.backoff * 2 ** (self._restarts - 2))
        self.phase, self._deadline = Phase.PAUSED, self._clock() + wait
        if wait:
            self._report(f"restart {self._restarts} of {self.policy.max_restarts} in {wait:g} s")
        else:
            self._start_generation()

    def _record_start(self, placement: Placement, idle: int) -> None:
        nodes = len({slot.node for slot in self._members})
        on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
        left = f"; {_processes(idle)} idle, because the mesh fits no more" if idle else ""
        text = f"{_processes(placement.processes)}{on_nodes}, {placement.devices} devices, {placement.mesh}{left}"
        record = {
            "kind": "start", "generation": self.generation, "processes": placement.processes, "nodes": nodes,
            "devices": placement.devices, "mesh": placement.mesh, "changes": list(placement.overrides), "idle": idle,
            "step": self._start_checkpoint,
        }  # fmt: skip
        self.events.append(LaunchEvent(f"generation {self.generation}: {text}", record))

    def _record_end(self, cause: str, code: int) -> None:
        seconds, newest = self._clock() - self._start_time, self.job.newest_checkpoint()
        checkpoint = "no checkpoint yet" if newest is None else f"checkpoint {newest} is the newest"
        record = {
            "kind": "end", "generation": self.generation, "processes": len(self._members), "cause": cause,
            "code": code, "seconds": round(seconds, 3), "step": newest,
        }  # fmt: skip
        line = f"generation {self.generation} ended after {seconds:.1f} s: {cause}; {checkpoint}"
        self.events.append(LaunchEvent(line, record))

    def _end_job(self, code: int, text: str | None = None) -> None:
        self.phase, self.code, self._deadline = Phase.OVER, code, float("inf")
        if text:
            self._report(text)
        for number in self.pool.nodes:
            self._send(number, "end", code=code, text=text or "")

    def _send(self, number: int, kind: str, **fields: Any) -> None:
        self.outbox.append((number, kind, fields))

    def _report(self, line: str) -> None:
        self.events.append(LaunchEvent(line))


def _processes(count: int) -> str:
    return f"{count} process{'es' if count != 1 else ''}"
