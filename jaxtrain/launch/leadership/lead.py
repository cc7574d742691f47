"""Body of a leader process: campaigns if there is a store, restores the saved state, and serves the agents."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from jaxtrain.distributed.job_store import DeposedError
from jaxtrain.io.addresses import address_text, wait_for_name
from jaxtrain.launch.job import ElasticJob
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.leadership.lease import campaign, open_job_store
from jaxtrain.launch.leadership.process import END, SIGN_OF_LIFE
from jaxtrain.launch.leadership.state import LeaderState, StateFile
from jaxtrain.launch.server import LeaderServer, last_generation, listen
from jaxtrain.launch.types import Phase, RestartPolicy

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the agent reports those that it gets


@dataclass(frozen=True)
class LeaderSettings:
    """Settings of a leader process.

    Args:
        job: random text that tells this job from earlier ones in the same directory.
        host: address to listen on, and for other nodes.
        port: port to listen on; 0 chooses a free one, of which agents hear by the store.
        secret: secret of the job.
        policy: timeouts and limits.
        store: URL of the consensus store; empty for none.
        begun: the store's revision of the last state that a leader had saved when the command began; 0 without a store.
    """

    job: str
    host: str
    port: int
    secret: str
    policy: RestartPolicy
    store: str = ""
    begun: int = 0

    def as_text(self) -> str:
        """Encodes the settings."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> LeaderSettings:
        """Decodes the settings."""
        fields = json.loads(text)
        return cls(**fields | {"policy": RestartPolicy(**fields["policy"])})


def lead(job: ElasticJob, settings: LeaderSettings, show: Callable[[str], None]) -> None:
    """Leads a job until it is over; with a store, whenever nobody else does.

    Args:
        job: the run to launch.
        settings: settings of this process.
        show: shows a line on the terminal; an empty one is a sign of life.

    Raises:
        UserError: the leader cannot listen on its address.
    """
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):  # macOS has a limit that it does not tell
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # each agent has a connection
    ended = threading.Event()
    signal.signal(END, lambda *_: ended.set())
    if not wait_for_name(settings.host, ended, lambda: show(SIGN_OF_LIFE)):  # the agent says so
        return
    if not settings.store:
        leadership = StateFile(job.directory, settings.job)
        listener = listen(settings.host, settings.port)
        leader = _leader(job, settings.policy, leadership.load(), last_generation(job.directory))
        LeaderServer(leader, listener, settings.secret, leadership, show).serve()
        leadership.close()
        return
    jobs = open_job_store(settings.store, job.directory)
    while not ended.is_set():
        listener = listen(settings.host, settings.port)
        port = listener.getsockname()[1]
        address = address_text(settings.host, port)
        lease = campaign(jobs, (settings.host, port), settings.policy.heartbeat, ended, lambda: show(SIGN_OF_LIFE))
        if lease is None:
            return
        try:
            is_earlier = lease.saved_at <= settings.begun  # of a job that had ended before this command, by no clock
            newest = max(lease.generation, last_generation(job.directory))
            leader = _leader(job, settings.policy, lease.load(), newest, is_earlier)
            if leader.phase is not Phase.OVER:
                show(f"launch  the leader is at {address} (leadership {lease.revision})")
            LeaderServer(leader, listener, settings.secret, lease, show).serve()
            return
        except DeposedError as error:
            show(f"launch  the leader at {address} leads no more: {error}")
        finally:
            listener.close()
            lease.close()


def _leader(
    job: ElasticJob, policy: RestartPolicy, saved: LeaderState | None, newest: int, is_earlier: bool = False
) -> Leader:
    """Creates the leader, from the saved state unless that is of an earlier job that has ended.

    Args:
        job: the run to launch.
        policy: timeouts and limits.
        saved: state of the last leader.
        newest: number of the newest generation.
        is_earlier: the state was saved before this command began.
    """
    leader = Leader(job, policy, generation=newest)
    if saved is None or saved.generation < newest:  # a full disk refused the newest one
        return leader
    if saved.phase != Phase.OVER.name or not is_earlier:
        leader.restore(saved)
    return leader
