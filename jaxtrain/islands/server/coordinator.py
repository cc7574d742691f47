"""The coordinator of a parameter server: who takes part, which pushes make an update, and who may read.

All decisions are made here, one after the other; the servers compute. A push counts when every server holds it, so an
island that fails in the middle of one leaves nothing behind, and one that was acknowledged is in the next update.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jaxtrain.config.sections.islands import IslandsConfig
from jaxtrain.islands.members import START_WAIT, BaseCoordinator, Member
from jaxtrain.islands.messages import Hello, Pulled, Push, Welcome
from jaxtrain.islands.partition import Parts
from jaxtrain.islands.server.policies import PushId, UpdatePolicy
from jaxtrain.islands.server.recent_messages import RecentMessages
from jaxtrain.islands.server.rules import Header


class Held(NamedTuple):
    """A push that all servers hold.

    Attributes:
        refs: references to its values, one for each server.
        is_finite: all its numbers are finite.
    """

    refs: list[Any]
    is_finite: bool


class Servers(Protocol):
    """The processes that hold the parameters.

    Attributes:
        parts: what each holds.
        given: references to what islands read, one for each.
        message: references to what the last update changed in that, in few bits.
        nbytes: of what islands read, and of the message.
    """

    parts: list[Parts]
    given: list[Any]
    message: list[Any]
    nbytes: tuple[int, int]

    async def open(self, hello: Hello) -> None:
        """Starts the servers for the tensors and the rule of the first island."""
        ...

    async def begin(self, refs: list[list[Any]]) -> None:
        """Takes the initial values."""
        ...

    async def hold(self, refs: list[list[Any]]) -> Held:
        """Takes a push, which then no longer depends on the island."""
        ...

    async def update(self, header: Header, pushes: list[Held]) -> None:
        """Makes an update of pushes."""
        ...

    async def save(self, record: Mapping[str, Any]) -> None:
        """Saves what the servers hold, with a record of the coordinator."""
        ...

    async def load(self) -> Mapping[str, Any] | None:
        """Returns the record of the newest save, once the servers hold what it has; None without one."""
        ...


class Coordinator(BaseCoordinator):
    """State and decisions; every method is called in one thread.

    Args:
        config: section `islands`.
        policy: when pushes become an update.
        servers: compute it.
        save_every: steps of the slowest island between saves; None: only at the end.
        log: takes a record of each event.
        now: clock, seconds.
    """

    def __init__(
        self, config: IslandsConfig, policy: UpdatePolicy, servers: Servers, save_every: int | None,
        log: Callable[[dict[str, Any]], None], now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__(config, log, now)
        self.policy, self.servers = policy, servers
        self.version = 0
        self.clock = 0  # of the newest update: steps of the island that is furthest
        self._save_every = save_every
        self._has_values = False
        self._arrived: set[int] = set()  # islands that were ever there
        self._saved_at = 0
        self._problem = ""  # of the last save
        self._progress = 0.0  # steps of all islands over their number
        self._numbers = 0  # of pushes
        self._pushes: dict[PushId, tuple[Push, Held, float]] = {}  # push, where it is held, its scale
        self._metrics: dict[str, float] = {}
        self._messages = RecentMessages()
        self._lock = asyncio.Lock()  # of updates

    async def join(self, hello: Hello, clock: int = 0) -> Welcome:
        """Lets an island take part.

        Args:
            hello: who it is.
            clock: its steps, which servers that hold nothing begin with.

        Raises:
            RefusedError: it does not fit the others.
        """
        self._check_index(hello)
        async with self._lock:
            if self._first is None:
                await self.servers.open(hello)
                self._first = hello
                await self._load()
            member = self._admit(hello, self.version)
            if self._has_values:
                clock = self._arrive(hello.island)
            else:
                self.clock = max(self.clock, clock)
            self._log({"event": "join", "island": hello.island, "clock": clock, "version": self.version})
            given = list(self.servers.given) if self._has_values else None
            return Welcome(member.session, clock, self.servers.parts, given, self.version)

    def _arrive(self, island: int) -> int:
        """Adds an island to the policy, with the others, before the first update at the clock of the start."""
        clock = self.policy.newcomer(self.clock) if self._has_started() else self.clock
        self.policy.join(island, clock)
        self._arrived.add(island)
        if self._starts_by is None:
            self._starts_by = self._now() + START_WAIT
        return clock

    def _has_started(self) -> bool:
        """Returns whether updates may be made: islands do not start at one moment, and none goes off alone."""
        if len(self._arrived) >= self.policy.first_needs:
            return True
        return self._starts_by is not None and self._now() >= self._starts_by

    async def begin(self, island: int, session: int, refs: list[list[Any]]) -> tuple[list[Any], int]:
        """Takes the initial values of an island, unless another was faster. Returns what it reads, and its version."""
        member = self._members.find(island, session)
        async with self._lock:
            if not self._has_values:
                await self.servers.begin(refs)
                self._has_values = True
            self._arrive(island)
            member.seen, member.read_at = self._now(), self.version
            return list(self.servers.given), self.version

    async def push(self, island: int, session: int, push: Push) -> bool:
        """Takes a push; when this returns, it is part of the next update that is due. Returns whether it counts.

        Raises:
            SessionOverError: the island has left; its work is not part of an update, see `push_late`.
        """
        member = self._members.find(island, session)
        if member.read_at < self.version and not self.policy.merges_stale:
            return await self.push_late(island, session, push, member.read_at)
        await self._take(island, session, push, 1.0)
        return True

    async def push_late(self, island: int, session: int, push: Push, version: int) -> bool:
        """Takes a push of an island that the others did not wait for, as `islands.late` says.

        Args:
            island: its index.
            session: of an island that had left, the new one.
            push: what it has computed.
            version: that it had read for it.
        """
        member = self._members.find(island, session)
        counts = self.config.late == "scale" and version <= self.version
        member.count(late=1, dropped=0 if counts else 1)
        self._log({"event": "late", "island": island, "clock": push.clock, "version": version, "counts": counts})
        if counts:
            member.read_at = version
            await self._take(island, session, push, 1.0 / (1 + self.version - version))
            return True
        own = push.clock if self.policy.merges_stale else self.clock
        await self._let_wait(island, member, max(own, self.policy.completed.get(island, 0)))
        return False

    async def start(self, island: int, session: int, clock: int) -> None:
        """Lets an island wait that begins further than the others, at its own checkpoint, until it may."""
        await self._let_wait(island, self._members.find(island, session), clock)

    async def _let_wait(self, island: int, member: Member, clock: int) -> None:
        member.released, member.waits_since = False, self._now()
        self.policy.wait(island, clock)
        await self._advance()

    async def _take(self, island: int, session: int, push: Push, scale: float) -> None:
        held = await self.servers.hold(push.refs)
        member = self._members.find(island, session)
        before = self.policy.completed.get(island, push.clock - 1)
        slowest = min(self.policy.completed.values(), default=before)
        member.waits_since, member.released = self._now(), False
        member.count(tokens=push.tokens, sent_bytes=push.nbytes, pushes=1)
        member.totals |= {} if push.loss is None else {"loss": push.loss}
        self._log({
            "event": "push", "island": island, "clock": push.clock, "ahead": before - slowest,
            "staleness": self.version - member.read_at, "tokens": push.tokens, "bytes": push.nbytes, "loss": push.loss,
            "scale": scale, "is_finite": held.is_finite, "version": self.version,
        })  # fmt: skip
        self._numbers += 1
        self._pushes[island, self._numbers] = push, held, scale
        self.policy.push(island, self._numbers, push.clock)
        await self._advance()

    async def pull(self, island: int, session: int, held: int | None = None) -> Pulled | None:
        """Returns what an island reads, once it may; None after `LONGEST_WAIT`, to be asked again.

        Args:
            island: its index.
            session: of its stay.
            held: version of the values that it has read in this stay, to which messages add; None: it reads all.
        """
        member = self._members.find(island, session)
        if await self._wait(lambda: member.released or None, island, session) is None:
            return None
        if member.waits_since is not None:
            member.count(waited=self._now() - member.waits_since)
        member.waits_since, member.read_at = None, self.version
        clock = self.policy.completed.get(island, self.clock)
        metrics, missed = dict(self._metrics), self._messages.since(held, self.version)
        if missed is not None:
            member.count(received_bytes=missed[1])
            return Pulled([], self.version, clock, metrics, missed[0])
        member.count(received_bytes=self.servers.nbytes[0])
        return Pulled(list(self.servers.given), self.version, clock, metrics)

    def _leave(self, island: int, why: str) -> None:
        if (member := self._members.remove(island)) is not None:
            member.clock = self.policy.completed.get(island, member.clock)
            self.policy.leave(island)
            self._log({"event": "leave", "island": island, "reason": why, "version": self.version})

    async def _advance(self) -> None:
        """Makes the updates that are due, and tells the islands that may read."""
        async with self._lock:
            while self._has_started() and (due := self.policy.next(self._now())) is not None:
                sessions = {island: self.members[island].session for island in due.readers}
                if due.pushes:
                    await self._update(due.pushes, due.readers)
                for island, session in sessions.items():
                    if (member := self.members.get(island)) is not None and member.session == session:
                        member.released = True
                if due.pushes:
                    await self._save_if_due()
        await self._tell()

    async def _update(self, numbers: list[PushId], readers: list[int]) -> None:
        chosen = [self._pushes.pop(number) for number in numbers]
        islands = tuple(island for island, _ in numbers)
        finite = tuple(held.is_finite for _, held, _ in chosen)
        present = max(len(self.policy.completed.keys() | set(islands)), 1)
        share = len(chosen) / present
        header = Header(
            islands, tuple(push.tokens for push, _, _ in chosen), tuple(scale for _, _, scale in chosen),
            step=int(self._progress + 1e-6), share=share, is_finite=finite,
        )  # fmt: skip
        await self.servers.update(header, [held for _, held, _ in chosen])
        self.version += 1
        self._messages.add(self.version, self.servers.message, self.servers.nbytes[1], self.servers.nbytes[0])
        self._progress += share
        self.clock = max(self.clock, *(push.clock for push, _, _ in chosen))
        self._metrics = {"pushing": float(len(islands)), "left_out": float(len(finite) - sum(finite))}
        self._log({
            "event": "update", "version": self.version, "islands": islands, "readers": readers, "share": share,
            "step": header.step,
        })  # fmt: skip

    async def _save_if_due(self) -> None:
        slowest = min(self.policy.completed.values(), default=self.clock)
        if self._save_every is not None and slowest - self._saved_at >= self._save_every:
            await self._save(slowest)

    async def _save(self, slowest: int) -> None:
        self._saved_at = slowest
        record = {"version": self.version, "clock": slowest, "progress": self._progress}
        try:
            await self.servers.save(record)
            self._problem = ""
            self._log({"event": "save", **record})
        except OSError as error:  # such as a full disk: the islands go on, and the next save is tried
            reason = error.strerror or str(error)
            self._problem = f"the servers could not save after {slowest} steps: {reason}"
            self._log({"event": "save failed", **record, "reason": reason})

    async def finish(self) -> None:
        """Saves the last state."""
        async with self._lock:
            if self._has_values:
                await self._save(min(self.policy.completed.values(), default=self.clock))

    async def _load(self) -> None:
        record = await self.servers.load()
        if record is not None:
            self.version, self.clock, self._progress = int(record["version"]), int(record["clock"]), record["progress"]
            self._has_values, self._saved_at = True, self.clock
            self._log({"event": "load", **record})

    def status(self) -> dict[str, Any]:
        """Returns what `jaxtrain islands status` shows."""
        islands = self._members.status(self.version, self._clock_of)
        return {"version": self.version, "clock": self.clock, "problem": self._problem, "islands": islands}

    def _clock_of(self, island: int, member: Member) -> int:
        return self.policy.completed.get(island, member.clock)
