"""Nodes of a job by the variables of Slurm, GKE, Open MPI and Kubernetes, compared with what JAX reads in them."""

from __future__ import annotations

import pytest

from jaxtrain.launch.scheduler import SchedulerJob, find_scheduler_job, first_host

SLURM = {"SLURM_JOB_ID": "4711", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "n[1-2]"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
GKE = {"TPU_WORKER_HOSTNAMES": "t-0.s,t-1.s", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("gpu-a[7]", "gpu-a7"),
        ("rack[2-3]node[04-09]", "rack2node04"),
        ("n[1-2]-ib,m", "n1-ib"),
    ],
)
def test_the_first_host_of_a_list(hosts: str, first: str):
    assert first_host(hosts) == first


def test_slurm_as_jax_reads_it(monkeypatch: pytest.MonkeyPatch):
    from jax._src.clusters.slurm_cluster import SlurmCluster

    for name, value in {**SLURM, "SLURM_STEP_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(name, value)
    found = find_scheduler_job(SLURM)
    assert (found.nodes, found.node) == (2, 1)
    assert f"{found.host}:{found.port}" == SlurmCluster.get_coordinator_address(None, None)
    step = find_scheduler_job({**SLURM, "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"})
    assert (step.host, step.nodes, step.node) == ("n2", 1, 0)


@pytest.mark.parametrize(
    "uri",
    [
        "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911",
        "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370",
        "1531576320.0;tcp://10.96.0.1:34911",
    ],
)
def test_open_mpi_as_jax_reads_it(monkeypatch: pytest.MonkeyPatch, uri: str):
    from jax._src.clusters.ompi_cluster import OmpiCluster

    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", uri)
    found = find_scheduler_job({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": uri})
    assert (found.nodes, found.node) == (8, 3)
    assert f"{found.host}:{found.port}" == OmpiCluster.get_coordinator_address(None, None)


def test_open_mpi_5_does_not_tell_the_address():
    assert find_scheduler_job(OPEN_MPI) == SchedulerJob(nodes=8, node=3)


def test_a_tpu_slice_and_several():
    assert find_scheduler_job(GKE) == SchedulerJob(nodes=2, node=1, host="t-0.s")
    several = {"MEGASCALE_NUM_SLICES": "3", "MEGASCALE_SLICE_ID": "2", "MEGASCALE_COORDINATOR_ADDRESS": "lead.s:8080"}
    assert find_scheduler_job({**GKE, **several}) == SchedulerJob(nodes=6, node=5, host="lead.s")


def test_an_indexed_job():
    index = {"JOB_COMPLETION_INDEX": "12"}
    assert find_scheduler_job(index, lambda: "train-12") == SchedulerJob(node=12, host="train-0")
    found = find_scheduler_job(index, lambda: "set-w-0-12.set.ns.svc")
    assert found == SchedulerJob(node=12, host="set-w-0-0.set.ns.svc")


def test_no_scheduler():
    assert find_scheduler_job({"HOME": "/"}) == SchedulerJob()
