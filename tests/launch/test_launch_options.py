"""Options from arguments, else the environment, else a one-line error."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from jaxtrain.cli.arguments import COMMANDS
from jaxtrain.config import Config
from jaxtrain.errors import UserError
from jaxtrain.launch.islands.options import IslandsOptions, parse_islands
from jaxtrain.launch.islands.options import resume_command as islands_resume_command
from jaxtrain.launch.islands.run import island_command
from jaxtrain.launch.options import parse_options, resume_command
from jaxtrain.launch.supervisor import worker_command


def parsed(*arguments: str, **environ: str):
    parser = argparse.ArgumentParser()
    COMMANDS["launch"].add_arguments(parser)
    return parse_options(parser.parse_intermixed_args(arguments), environ)


def islands_options(*arguments: str) -> IslandsOptions:
    parser = argparse.ArgumentParser()
    COMMANDS["launch"].add_arguments(parser)
    return parse_islands(parser.parse_intermixed_args(["islands", "c.yaml", *arguments]))


def of_islands(*arguments: str) -> tuple[str, ...]:
    """The command that an island of 4 simulated devices is."""
    return island_command(islands_options(*arguments), Config(simulate=4))


def test_an_island_of_several_processes_or_nodes_is_launched():
    fixed = ("--max-restarts=5", "--collective-timeout=300")
    assert of_islands("--islands", "2") == ("resume",)
    local = ("launch", "local", "--devices-per-process=2", "--processes=2")
    assert of_islands("--processes", "2") == (*local, *fixed)
    nodes = ("--here", "1", "--nodes", "2", "--node", "1", "--coordinator", "head:29400")
    shared = ("--nodes=2", "--node=1", "--coordinator=head:29400")
    found = of_islands(*nodes, "--processes", "2", "--devices-per-process", "3")
    given = ("--processes=2", "--devices-per-process=3", *shared, *fixed)  # of two of one option the last one counts
    assert found == ("launch", "node", "--devices-per-process=1", *given)
    assert of_islands("--processes", "3") == ("launch", "local", "--processes=3", *fixed)  # which says what is wrong
    for here in ([], ["--here", "0,1"]):
        with pytest.raises(UserError, match="launch: --nodes 2: expected --here with the island that has them"):
            of_islands("--nodes", "2", *here)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--devices-per-process", "2"], "--devices-per-process 2: expected --processes or --nodes with it"),
    (["--processes", "2", "--node", "1"], "--node 1: expected --nodes with it"),
    (["--coordinator", "head:1"], "--coordinator head:1: expected --nodes with it"),
])  # fmt: skip
def test_an_option_that_an_island_would_not_hear_of_is_one_line(arguments, said):
    with pytest.raises(UserError, match=f"launch: {said}"):
        islands_options(*arguments)


def test_the_command_that_goes_on_with_islands_has_their_options():
    given = ("--address=head:6379", "--here=1", "--processes=4", "--nodes=2", "--node=0", "--coordinator=a:1")
    found = islands_resume_command(islands_options(*given), Path("/runs/a b"))
    assert found == f"jaxtrain launch islands {' '.join(given)} '/runs/a b'"
    assert islands_resume_command(islands_options(), Path("/runs/a")) == "jaxtrain launch islands /runs/a"


def test_local_listens_on_loopback_alone():
    found = parsed("local", "c.yaml", "steps=3", "--processes", "4", JAXTRAIN_NODES="9", SLURM_NODEID="3")
    assert found.agent.leader == ("127.0.0.1", 0)
    assert (found.agent.node, found.agent.slots, found.policy.nodes) == (0, 4, 1)
    assert (found.source, found.overrides) == ("c.yaml", ("steps=3",))


def test_a_node_takes_arguments_then_its_own_names_then_slurms():
    env = {
        "JAXTRAIN_COORDINATOR": "10.0.0.1:29400", "SLURM_JOB_ID": "7", "SLURM_NNODES": "8", "SLURM_NODEID": "5",
        "JAXTRAIN_NODE": "6", "JAXTRAIN_PROCESSES": "2",
    }  # fmt: skip
    found = parsed("node", "c.yaml", **env)
    assert (found.agent.node, found.policy.nodes, found.agent.slots) == (6, 8, 2)
    assert found.agent.leader == ("10.0.0.1", 29400)
    assert found.agent.host == ""
    assert parsed("node", "c.yaml", "--node", "0", **env).agent.host == "10.0.0.1"
    assert parsed("node", "c.yaml", "--node", "7", "--host", "me", **env).agent.host == "me"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("local",), "--processes, or JAXTRAIN_PROCESSES"),
        (
            ("node", "--processes=1", "--node=0", "--coordinator=h:1"),
            "--nodes, or JAXTRAIN_NODES, or a scheduler",
        ),
        (
            ("node", "--processes=1", "--nodes=2", "--coordinator=h:1"),
            "--node, or JAXTRAIN_NODE, or a scheduler",
        ),
        (("node", "--processes=1", "--nodes=2", "--node=0"), "--coordinator, or JAXTRAIN_COORDINATOR"),
        (("node", "--processes=1", "--nodes=2", "--node=0", "--coordinator=h"), "HOST:PORT"),
        (("node", "--processes=1", "--nodes=2", "--node=0", "--coordinator=h..a:1"), "HOST:PORT"),
        (("local", "--processes=0"), "at least 1"),
        (("local", "--processes=2", "--spares=2"), "fewer than the 2"),
        (("local", "--processes=2", "--heartbeat=0"), "seconds above 0"),
        (("local", "--processes=2", "--max-restarts=-1"), "at least 0"),
        (("local", "--processes=2", "--deadline=-1"), "--deadline -1: expected seconds, or 0 for none"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(arguments, said):
    with pytest.raises(UserError, match=said) as caught:
        parsed(arguments[0], "c.yaml", *arguments[1:])
    assert "\n" not in str(caught.value)


def test_workers_hear_of_a_deadline_only_where_one_is_given():
    for given, expected in (((), []), (("--deadline=2.5",), ["--deadline=2.5"])):
        chosen = parsed("local", "c.yaml", "--processes=2", *given)
        assert list(worker_command(chosen.deadline)("/runs/a"))[4:] == ["resume", "/runs/a", *expected]


def test_the_command_that_goes_on():
    more = ("--fallback", "mesh.model=1 zero=1", "--deadline=60")
    found = parsed("local", "c.yaml", "--processes=2", "--devices-per-process=3", *more)
    assert resume_command(found, "/runs/a b") == (
        "jaxtrain launch local --processes=2 --devices-per-process=3 --deadline=60 '--fallback=mesh.model=1 zero=1' "
        "'/runs/a b'"
    )


NODE = ("node", "c.yaml", "--processes=1", "--nodes=2", "--node=0")


def test_with_a_store_no_node_has_to_be_named():
    found = parsed(*NODE, JAXTRAIN_STORE="etcd://a:2379,[::1]:2379")
    assert (found.agent.store, found.agent.leader, found.agent.host) == ("etcd://a:2379,[::1]:2379", None, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--store=redis://a:1",), "expected etcd://HOST:PORT,HOST:PORT,... without a password"),
        (("--store=etcd://a",), "expected etcd://HOST:PORT"),
        (("--store=etcd://user:secret@a:1",), "without a password"),
        (("--store=etcd://a:1", "--resume=never"), "expected --resume auto"),
    ],
)
def test_a_store_that_is_none_is_refused(arguments: tuple[str, ...], said: str):
    with pytest.raises(UserError) as error:
        parsed(*NODE, *arguments)
    assert said in str(error.value)
    assert "secret" not in str(error.value)
