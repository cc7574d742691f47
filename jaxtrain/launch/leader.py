"""What the leader decides, without sockets, processes or JAX: every method is something that happened.

Nothing is done here: what the agents are to be told lies in `outbox`, what is to be written and said in `news`.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxtrain.exit_codes import SAVED, USAGE
from jaxtrain.launch.exit_reasons import exit_code, is_clean, rank_of_cause, words
from jaxtrain.launch.policy import Cause, News, Phase, Placement, Policy, Run
from jaxtrain.launch.roster import Failures, Node, Roster, Slot

SETTLE = 0.5  # seconds that a victim's end waits for that of the worker it was a victim of
KILL = 60.0  # seconds that a node may take to be rid of killed workers
LONGEST = 60.0  # seconds of back-off at most
DISK = 10.0  # seconds until a disk that took nothing is tried again


class Leader:
    """Numbers the generations, and decides when one ends and what the next one runs on."""

    def __init__(
        self, run: Run, policy: Policy, *, generation: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """
        Args:
            run: what is run.
            policy: see there.
            generation: number of the last one of an earlier launch of this run.
            clock: seconds.
        """
        self.run, self.policy, self._clock = run, policy, clock
        self.roster = Roster(Failures(policy.failures), policy.spares)
        self.outbox: deque[tuple[int, str, dict[str, Any]]] = deque()
        self.news: deque[News] = deque()
        self.phase, self.code = Phase.WAITING, None
        self.generation = self._before = generation
        self._deadline = clock() + policy.join_timeout
        self._members: list[Slot] = []
        self._exits: dict[int, int] = {}
        self._cause: Cause | None = None
        self._reason: str | None = None  # why a clean stop was asked for
        self._signal: int | None = None  # of whoever wants the whole job to stop
        self._restarts, self._begun, self._newest = 0, 0.0, None
        self._kept, self._reached = -1, -1  # newest step in memory; newest of all when the generation began
        self._token = secrets.token_hex(16)  # of this job: what the nodes' stocks of states want to hear

    # What happens

    def joined(self, number: int, slots: int, host: str, port: int, memory: int = 0) -> None:
        """A node has come, or come back; a generation that it would enlarge is asked to stop."""
        node = Node(number, host, slots, port, memory, self._clock())
        self.roster.add(node)
        if self.phase is Phase.RUNNING and not self._exits and self._cause is None:
            placement = self.run.place(len(self.roster.usable()))
            if placement is not None and placement.processes > len(self._members):
                self._stop(f"{node} joined: going on with {_processes(placement.processes)}")
        elif self.phase is Phase.WAITING:
            is_whole = len(self.roster.nodes) >= self.policy.nodes
            if is_whole or (self._members and self.run.place(len(self.roster.usable())) is not None):
                self._start()

    def beat(self, number: int) -> None:
        """A node is alive."""
        self.roster.nodes[number].seen = self._clock()

    def lost(self, number: int, why: str) -> None:
        """A node is gone, or cannot be reached."""
        node = self.roster.nodes.pop(number, None)
        if node is None or self.phase is Phase.OVER:
            return
        self._tell(number, "kill", generation=self.generation)
        if self.phase in (Phase.RUNNING, Phase.STOPPING) and any(slot.node == number for slot in self._members):
            self._fail(Cause(f"{node} is lost: it {why}", 1))
        else:
            self._say(f"{node} is lost: it {why}")
        self._ended()

    def exited(self, number: int, generation: int, rank: int, pid: int, code: int) -> None:
        """A worker has ended."""
        is_on = generation == self.generation and self.phase in (Phase.RUNNING, Phase.STOPPING)
        if not is_on or not 0 <= rank < len(self._members) or self._members[rank].node != number:
            return
        self._exits[rank] = code
        if is_clean(code):
            if len(self._exits) == 1:
                self._deadline = self._clock() + self.policy.stop_timeout
            return
        cause = Cause(f"process {rank} (pid {pid}) {words(code)}", code, self._members[rank])
        if rank_of_cause(code) == 0:
            self._fail(cause)
        elif self._cause is None:
            self._cause, self._deadline = cause, self._clock() + SETTLE

    def idle(self, number: int, generation: int, port: int, kept: int = -1) -> None:
        """A node has no workers left; `kept` is the newest step in its memory."""
        node = self.roster.nodes[number]
        node.port, self._kept = port, max(self._kept, kept)
        if generation == self.generation:
            node.is_idle = True
            self._ended()

    def signalled(self, number: int, received: int, again: bool = False) -> None:
        """An agent was told to stop: all workers save, and the job ends; told again, everything ends at once."""
        self._signal = received
        reason = f"node {number} received signal {received}" if self.policy.nodes > 1 else f"signal {received}"
        if again and self.phase is not Phase.OVER:
            if self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDING):
                self._log(f"{reason} for the second time", 128 + received)
            self._over(128 + received)
        elif self.phase is Phase.RUNNING:
            self._stop(reason)
        elif self.phase in (Phase.WAITING, Phase.PAUSED):
            self._over(SAVED, f"stopped by {reason}")

    def tick(self) -> None:
        """Time has passed."""
        now = self._clock()
        for node in list(self.roster.nodes.values()):
            if now - node.seen > self.policy.heartbeat:
                self.lost(node.number, f"gave no sign of life for {self.policy.heartbeat:g} s")
        if self.phase is Phase.OVER or now < self._deadline:
            return
        if self.phase is Phase.WAITING:
            self._waited()
        elif self.phase is Phase.PAUSED:
            self._start()
        elif self.phase is Phase.ENDING:
            for node in [node for node in self.roster.nodes.values() if not node.is_idle]:
                self.lost(node.number, f"could not be rid of its workers within {KILL:g} s")
        else:
            self._overdue()

    def next_tick(self) -> float:
        """Seconds until the next deadline, at least 0."""
        return max(0.0, self._deadline - self._clock())

    # What follows

    def _waited(self) -> None:
        count = len(self.roster.nodes)
        waited = f"{count} of {self.policy.nodes} nodes joined within {self.policy.join_timeout:g} s"
        if count == 0:
            self._over(1, f"{waited}, nothing to run on")
            return
        self._say(f"{waited}: starting without the others")
        self._start(waits=False)

    def _overdue(self) -> None:
        """The time is up for a victim's cause, or for workers that should have followed the first."""
        late = [rank for rank in range(len(self._members)) if rank not in self._exits]
        if self._cause is not None:
            if self._cause.code == -signal.SIGABRT and len(late) == 1:  # all others were ended because of this one
                text = f"process {late[0]} did not answer its peers, which JAX ended"
                self._cause = Cause(text, -signal.SIGABRT, self._members[late[0]])
            self._fail(self._cause)
            return
        which = ", ".join(map(str, late[:8])) + (", ..." if len(late) > 8 else "")
        text = f"process {which} did not stop within {self.policy.stop_timeout:g} s"
        self._fail(Cause(text, 1, self._members[late[0]] if late else None))

    def _start(self, waits: bool = True) -> None:
        """The next generation, on whatever is there; on too few it waits for lost nodes, once."""
        slots = self.roster.usable()
        placement = self.run.place(len(slots))
        if placement is None:
            self._too_few(len(slots), waits)
            return
        try:
            self.run.begin(placement)
        except OSError as error:  # a full disk may be emptied
            self._say(f"the config cannot be written ({error.strerror or error}); trying again in {DISK:g} s")
            self.phase, self._deadline = Phase.PAUSED, self._clock() + DISK
            return
        self.generation += 1
        self._members, idle = slots[: placement.processes], len(slots) - placement.processes
        self._exits, self._cause, self._reason = {}, None, None
        self._begun, self._newest = self._clock(), self.run.newest()
        self._reached = self._progress()
        self.phase, self._deadline = Phase.RUNNING, float("inf")
        first = self.roster.nodes[self._members[0].node]
        address = f"[{first.host}]:{first.port}" if ":" in first.host else f"{first.host}:{first.port}"
        for node in self.roster.nodes.values():
            ranks = [rank for rank, slot in enumerate(self._members) if slot.node == node.number]
            node.is_idle = not ranks
            if ranks:
                mine = {"slots": [self._members[rank].index for rank in ranks], "ranks": ranks}
                self._tell(
                    node.number, "start", generation=self.generation, run=str(self.run.directory), address=address,
                    count=placement.processes, devices=placement.devices // placement.processes,
                    simulated=self.run.is_simulated, memory=self.policy.memory, token=self._token,
                    stocks=self._stocks(node), **mine,
                )  # fmt: skip
        self._announce(placement, idle)

    def _progress(self) -> int:
        """The newest step that would survive a failure now; -1 for none."""
        newest = self.run.newest()
        return max(-1 if newest is None else newest, self._kept)

    def _stocks(self, node: Node) -> list[str]:
        """HOST:PORT of the nodes' memories: in a ring that begins with its own, so that each keeps another's copies."""
        ring = sorted((known for known in self.roster.nodes.values() if known.memory), key=lambda known: known.number)
        at = next((index for index, known in enumerate(ring) if known.number >= node.number), 0)
        return [f"{known.host}:{known.memory}" for known in ring[at:] + ring[:at]]

    def _too_few(self, slots: int, waits: bool) -> None:
        text = f"the mesh fits no number of processes up to {slots}; expected an axis of -1, or --fallback"
        if waits and len(self.roster.nodes) < self.policy.nodes:
            self._say(f"{text}; waiting {self.policy.join_timeout:g} s for nodes")
            self.phase, self._deadline = Phase.WAITING, self._clock() + self.policy.join_timeout
        else:
            self._over(exit_code(self._cause.code) if self._cause else 1, text if slots else "no slot is left")

    def _announce(self, placement: Placement, idle: int) -> None:
        nodes = len({slot.node for slot in self._members})
        where = f" on {nodes} nodes" if nodes > 1 else ""
        left = f"; {_processes(idle)} idle, because the mesh fits no more" if idle else ""
        said = f"{_processes(placement.processes)}{where}, {placement.devices} devices, {placement.mesh}{left}"
        record = {
            "kind": "start", "generation": self.generation, "processes": placement.processes, "nodes": nodes,
            "devices": placement.devices, "mesh": placement.mesh, "changes": list(placement.changes), "idle": idle,
            "step": self._newest,
        }  # fmt: skip
        self.news.append(News(f"generation {self.generation}: {said}", record))

    def _stop(self, reason: str) -> None:
        """Asks the workers to save and stop."""
        self.phase, self._reason = Phase.STOPPING, reason
        self._deadline = self._clock() + self.policy.stop_timeout
        self._say(f"{reason}; saving")
        for number in self.roster.nodes:
            self._tell(number, "stop", generation=self.generation)

    def _fail(self, cause: Cause) -> None:
        """Ends the generation at once."""
        self._cause = cause
        self.phase, self._deadline = Phase.ENDING, self._clock() + KILL
        for number in self.roster.nodes:
            self._tell(number, "kill", generation=self.generation)
        self._ended()

    def _ended(self) -> None:
        """Goes on when no worker of the generation is left."""
        is_on = self.phase in (Phase.RUNNING, Phase.STOPPING, Phase.ENDING)
        if not is_on or not all(node.is_idle for node in self.roster.nodes.values()):
            return
        if self._progress() > self._reached:
            self._restarts = 0
            self.roster.failures.progressed()
        if self._cause is None:
            self._stopped()
        else:
            self._failed(self._cause)

    def _stopped(self) -> None:
        """All workers ended well."""
        is_done = all(code == 0 for code in self._exits.values())
        self._log("finished" if is_done else self._reason or "a worker received a signal", 0 if is_done else SAVED)
        if is_done:
            self._over(0)
        elif self._reason is None or self._signal is not None:
            self._over(SAVED)
        else:
            self._start()

    def _failed(self, cause: Cause) -> None:
        """A worker or a node failed."""
        was_starting = self._reason is not None and cause.code == -signal.SIGTERM  # told to stop before it could save
        self._log(self._reason if was_starting and self._reason else cause.text, exit_code(cause.code))
        if self._signal is not None:
            self._over(SAVED if was_starting else exit_code(cause.code))
        elif was_starting:
            self._start()
        elif cause.code == USAGE and self.generation == self._before + 1:
            self._over(USAGE)
        else:
            self._restart(cause)

    def _restart(self, cause: Cause) -> None:
        listed = self.roster.failures.blame(cause.slot, self.roster.nodes) if cause.slot else None
        if listed:
            self._say(f"{listed} is black-listed after {self.policy.failures} failures in a row without a checkpoint")
        self._restarts += 1
        if self._restarts > self.policy.max_restarts:
            many = f"{self.policy.max_restarts} restarts in a row without a newer checkpoint"
            self._over(exit_code(cause.code), f"gave up: {many}" if self.policy.max_restarts else None)
            return
        wait = 0.0 if self._restarts == 1 else min(LONGEST, self.policy.backoff * 2 ** (self._restarts - 2))
        self.phase, self._deadline = Phase.PAUSED, self._clock() + wait
        if wait:
            self._say(f"restart {self._restarts} of {self.policy.max_restarts} in {wait:g} s")
        else:
            self._start()

    def _log(self, cause: str, code: int) -> None:
        """The end of a generation."""
        took, newest = self._clock() - self._begun, self.run.newest()
        kept = "no checkpoint yet" if newest is None else f"checkpoint {newest} is the newest"
        record = {
            "kind": "end", "generation": self.generation, "processes": len(self._members), "cause": cause,
            "code": code, "seconds": round(took, 3), "step": newest,
        }  # fmt: skip
        self.news.append(News(f"generation {self.generation} ended after {took:.1f} s: {cause}; {kept}", record))

    def _over(self, code: int, text: str | None = None) -> None:
        self.phase, self.code, self._deadline = Phase.OVER, code, float("inf")
        if text:
            self._say(text)
        for number in self.roster.nodes:
            self._tell(number, "end", code=code, text=text or "")

    def _tell(self, number: int, kind: str, **fields: Any) -> None:
        self.outbox.append((number, kind, fields))

    def _say(self, line: str) -> None:
        self.news.append(News(line))


def _processes(count: int) -> str:
    return f"{count} process{'es' if count != 1 else ''}"
