"""Nodes of a job as its scheduler describes them in the environment."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

PORT = 29400  # of the leader, where only one job uses a node's network address
PORTS = (61440, 4096)  # first and number of those that jobs of one scheduler share, as in `jax.distributed`


@dataclass(frozen=True)
class SchedulerJob:
    """Job of a scheduler, as one of its nodes sees it. None is what the environment does not tell.

    Attributes:
        nodes: number of nodes.
        node: index of this node.
        host: address of node 0.
        port: on which node 0 listens.
    """

    nodes: int | None = None
    node: int | None = None
    host: str | None = None
    port: int = PORT


def find_scheduler_job(environ: Mapping[str, str], hostname: Callable[[], str] = socket.getfqdn) -> SchedulerJob:
    """Returns the job that the environment describes: of Slurm, GKE with TPUs, Open MPI, or a Kubernetes indexed job.

    Args:
        environ: environment of a process that the scheduler has started, one on each node.
        hostname: returns the full name of this node.
    """
    if "SLURM_JOB_ID" in environ:
        return _slurm(environ)
    if "TPU_WORKER_HOSTNAMES" in environ:
        return _gke(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _open_mpi(environ)
    if "JOB_COMPLETION_INDEX" in environ:
        return _indexed_job(environ, hostname())
    return SchedulerJob()


def _slurm(environ: Mapping[str, str]) -> SchedulerJob:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    number, node = (_number(environ, *names) for names in (("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), ("SLURM_NODEID",)))
    return SchedulerJob(number, node, first_host(nodes) if nodes else None, _job_port(environ["SLURM_JOB_ID"]))


def _gke(environ: Mapping[str, str]) -> SchedulerJob:
    """Reads the variables of a TPU slice, and of several joined by Megascale."""
    hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
    slices, index = _number(environ, "MEGASCALE_NUM_SLICES") or 1, _number(environ, "MEGASCALE_SLICE_ID") or 0
    worker, leader = _number(environ, "TPU_WORKER_ID"), environ.get("MEGASCALE_COORDINATOR_ADDRESS")
    node = None if worker is None else worker + index * len(hosts)
    return SchedulerJob(len(hosts) * slices, node, leader.partition(":")[0] if leader else hosts[0])


def _open_mpi(environ: Mapping[str, str]) -> SchedulerJob:
    """Reads the variables of Open MPI. Since version 5 they do not tell the address of a host."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.search(r"tcp6?://\[?([^,\]/]+?)(?:[,\]]|:\d+(?:;|$))", uri)
    number = uri.partition(".")[0]
    port = _job_port(str(int(number) >> 12)) if number.isdecimal() else PORT  # its lowest 12 bits are zero
    nodes, node = (_number(environ, f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK"))
    return SchedulerJob(nodes, node, found[1] if found else None, port)


def _indexed_job(environ: Mapping[str, str], hostname: str) -> SchedulerJob:
    """Reads the variables of a Kubernetes indexed job or a JobSet, whose pods are named NAME-INDEX.

    They do not tell the number of pods. The pods find one another if the job has the subdomain of a headless service.
    """
    index = _number(environ, "JOB_COMPLETION_INDEX")
    name, dot, domain = hostname.partition(".")
    first = re.sub(rf"-{index}$", "-0", name)
    return SchedulerJob(node=index, host=f"{first}{dot}{domain}")


def first_host(hosts: str) -> str:
    """Returns the first name of Slurm's list of hosts, such as n001 of `n[001-016,020],m5`."""
    prefix, bracket, rest = re.match(r"([^,\[]*)(\[?)(.*)", hosts).groups()  # pyright: ignore[reportOptionalMemberAccess]
    if not bracket:
        return prefix
    numbers, _, after = rest.partition("]")
    return prefix + re.split("[-,]", numbers)[0] + first_host(after)


def _job_port(job: str) -> int:
    """Returns the port of a job's leader, which differs between jobs whose numbers are near each other."""
    first, count = PORTS
    return first + int(job) % count if job.isdecimal() else PORT


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    """Returns the first of these variables that is a number."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)
