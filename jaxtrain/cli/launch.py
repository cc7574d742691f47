"""`jaxtrain launch`: its arguments, and what it does. Nothing heavy is imported for `--help`."""

from __future__ import annotations

import argparse


def arrange(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxtrain launch`."""
    add = parser.add_argument
    add("where", choices=("local", "node"), help="all processes here, or this node's part of them")
    add("config", help="YAML file, or RUN_DIR to go on with")
    add("overrides", nargs="*", metavar="key=value", help="config values, e.g. layout=tp mesh.model=4")
    add("--processes", type=int, metavar="P", help="worker processes on this node")
    add("--devices-per-process", type=int, metavar="D", help="default: a share of `simulate`, or 1 GPU")
    add("--fallback", action="append", default=[], metavar="'K=V ...'", help="tried in order where the mesh misfits")
    add("--spares", type=int, default=0, metavar="N", help="processes held back until another is lost (0)")
    add("--memory", type=int, default=0, metavar="K", help="copy states to the memory of 2 nodes every K steps (0: no)")
    add("--max-restarts", type=int, default=5, metavar="N", help="in a row without a newer checkpoint (5)")
    add("--max-failures", type=int, default=3, metavar="N", help="in a row until a slot or node is black-listed (3)")
    add("--backoff", type=float, default=1.0, metavar="S", help="seconds before a second restart, then doubled (1)")
    add("--heartbeat", type=float, default=20.0, metavar="S", help="seconds of silence until a node is lost (20)")
    add("--collective-timeout", type=int, default=300, metavar="S", help="of CPU devices that wait for others (300)")
    add("--join-timeout", type=float, default=120.0, metavar="S", help="seconds to wait for nodes (120)")
    add("--stop-timeout", type=float, default=300.0, metavar="S", help="seconds to save and stop (300)")
    add("--deadline", type=float, metavar="S", help="of a step or its data that hang, as of `train`; 0: never")
    add("--nodes", type=int, metavar="N", help="node: how many there are (JAXTRAIN_NODES, SLURM_NNODES)")
    add("--node", type=int, metavar="I", help="node: which this is, from 0 (JAXTRAIN_NODE, SLURM_NODEID)")
    add("--coordinator", metavar="HOST:PORT", help="node: where node 0 listens (JAXTRAIN_COORDINATOR)")
    add("--host", metavar="HOST", help="node: where others reach this one; default: as node 0 sees it")


def launch(args: argparse.Namespace) -> int:
    """Trains in several processes; see `jaxtrain.launch`."""
    from jaxtrain.exit_codes import SAVED
    from jaxtrain.launch.options import again, options
    from jaxtrain.launch.supervisor import supervise
    from jaxtrain.launch.worker_logs import Terminal

    chosen, terminal = options(args), Terminal()
    try:
        code, directory = supervise(chosen, terminal)
        if code == SAVED and directory is not None:
            terminal.say(f"next  {again(chosen, directory)}")
        return code
    finally:
        terminal.close()
