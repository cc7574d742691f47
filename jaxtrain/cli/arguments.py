"""Arguments of all commands. Imports nothing heavy: `jaxtrain COMMAND --help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

Parser = argparse.ArgumentParser


class Command(NamedTuple):
    """A command of `jaxtrain`.

    Attributes:
        module: module of `jaxtrain.cli.commands` whose `run(args)` executes it and returns the exit code; `module:f`
            names another function.
        help: one line that says what it does.
        add_arguments: adds its arguments to a parser.
    """

    module: str
    help: str
    add_arguments: Callable[[Parser], None]


COMMON: dict[str, dict[str, Any]] = {
    "config": {"help": "YAML file, or a shipped config such as quickstart"},
    "run": {"metavar": "RUN_DIR", "help": "run directory"},
    "overrides": {"nargs": "*", "metavar": "key=value", "help": "config values, e.g. layout=tp mesh.model=4"},
    "--simulate": {"type": int, "metavar": "N", "help": "run on N simulated CPU devices"},
    "--step": {"type": int, "metavar": "N", "help": "checkpoint to read (default: the newest good one)"},
}


def _add_common(parser: Parser, *names: str) -> None:
    """Adds arguments of `COMMON`."""
    for name in names:
        parser.add_argument(name, **COMMON[name])


def _add_monitoring(parser: Parser) -> None:
    parser.add_argument("--profile", metavar="START:STOP", help="write an XProf trace of these steps")
    hang = (
        "end the process with exit code 70 if a step or its data take longer "
        "(default: from measured step times; 0: never)"
    )
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help=hang)
    parser.add_argument("--verbose", action="store_true", help="print the layout of every parameter")


def _add_resume(parser: Parser, default: str) -> None:
    text = f"auto: continue the run in DIR/NAME if it has the same config; never: begin a new one ({default})"
    parser.add_argument("--resume", choices=("auto", "never"), help=text)


def _train(parser: Parser) -> None:
    _add_common(parser, "config", "overrides", "--simulate")
    _add_resume(parser, "auto under a scheduler without a terminal, else never")
    _add_monitoring(parser)


def _resume(parser: Parser) -> None:
    _add_common(parser, "run", "overrides", "--simulate")
    _add_monitoring(parser)


def _launch(parser: Parser) -> None:
    add = parser.add_argument
    kinds = "local: start all processes here; node: start those of this node; islands: runs that agree by a server"
    add("where", choices=("local", "node", "islands"), help=kinds)
    add("config", nargs="?", help="YAML file, or RUN_DIR to resume; or a command after `--`, as -- python train.py")
    parser.set_defaults(command=())
    _add_common(parser, "overrides")
    _add_resume(parser, "auto")
    add("--processes", type=int, metavar="P", help="worker processes on this node; islands: of each island")
    add("--devices-per-process", type=int, metavar="D", help="(default: an equal share of `simulate`, or 1 GPU)")
    add("--fallback", action="append", default=[], metavar="'K=V ...'",
        help="overrides to try if the mesh does not fit the processes; may be repeated")  # fmt: skip
    add("--spares", type=int, default=0, metavar="N", help="processes held back to replace lost ones (0)")
    add("--memory", type=int, default=0, metavar="K",
        help="copy the train state to the memory of 2 nodes every K steps (0: never)")  # fmt: skip
    add("--max-restarts", type=int, default=5, metavar="N", help="restarts in a row without a newer checkpoint (5)")
    add("--max-failures", type=int, default=3, metavar="N",
        help="failures in a row until a slot or node goes on the denylist (3)")  # fmt: skip
    add("--backoff", type=float, default=1.0, metavar="S", help="seconds before a second restart, then doubled (1)")
    add("--heartbeat", type=float, default=20.0, metavar="S", help="seconds of silence until a node is lost (20)")
    add("--collective-timeout", type=int, default=300, metavar="S",
        help="seconds that a collective of CPU devices waits for other processes (300)")  # fmt: skip
    add("--join-timeout", type=float, default=120.0, metavar="S", help="seconds to wait for nodes (120)")
    add("--stop-timeout", type=float, default=300.0, metavar="S", help="seconds to save and stop (300)")
    add("--deadline", type=float, metavar="S", help="end a worker whose step or data hang, as `train --deadline`")
    add("--nodes", type=int, metavar="N", help="node: number of nodes (JAXTRAIN_NODES; else as the scheduler says)")
    add("--node", type=int, metavar="I", help="node: index of this one, from 0 (JAXTRAIN_NODE; else as above)")
    add("--coordinator", metavar="HOST:PORT", help="node: address of node 0 (JAXTRAIN_COORDINATOR; else as above)")
    add("--store", metavar="URL",
        help="node: etcd://HOST:PORT,..., in place of --coordinator: any node may lead (JAXTRAIN_STORE)")  # fmt: skip
    add("--islands", type=int, metavar="N", help="islands: their number (default: islands.count)")
    add("--here", metavar="I,J", help="islands: those of this machine (default: all)")
    add("--address", metavar="HOST:PORT", help="islands: a Ray cluster that is there (default: one is started here)")
    add("--host", metavar="HOST",
        help="node: address of this node for other nodes (default: as node 0 sees it; JAXTRAIN_HOST)")  # fmt: skip


def _islands(parser: Parser) -> None:
    kinds = "status: clock, staleness and bytes of every island; report: that with curves and waits, as a page"
    parser.add_argument("action", choices=("status", "report"), help=kinds)
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--html", metavar="FILE", help="report: the page to write (default: RUN_DIR/islands.html)")


def _eval(parser: Parser) -> None:
    _add_common(parser, "run", "overrides", "--step", "--simulate")
    parser.add_argument("--batches", type=int, metavar="N", help="validation batches (default: the config's)")
    parser.add_argument("--tasks", metavar="A,B", help="run these tasks of the lm-evaluation-harness instead")
    parser.add_argument("--include-path", metavar="DIR", help="with --tasks: folder with more task files (YAML)")
    parser.add_argument("--limit", type=int, metavar="N", help="with --tasks: at most N documents of each")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="with --tasks: examples before each document")
    parser.add_argument("--out", metavar="FILE", help="write the results as JSON")


def _generate(parser: Parser) -> None:
    parser.add_argument(
        "run", metavar="RUN_DIR", help="run directory, folder of a Hugging Face model, or its name on the Hub"
    )
    _add_common(parser, "overrides", "--step", "--simulate")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be repeated")
    parser.add_argument("--prompts", metavar="FILE", help="file with more prompts, one per line")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="generate at most N tokens (128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="sampling temperature; 0 is greedy (0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the likeliest tokens up to probability P")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the sampling (0)")


def _import(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="folder with config.json and safetensors files, or a name on the Hub"
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="run directory to create")
    _add_common(parser, "overrides", "--simulate")


def _export(parser: Parser) -> None:
    _add_common(parser, "run", "overrides", "--step", "--simulate")
    parser.add_argument("--to", required=True, metavar="HF_DIR", help="folder to create")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, help="dtype of the files (default: as stored)")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="largest size of a file (5GB)")
    family = "model_type to write (default: that of the imported model, else the first that fits)"
    parser.add_argument("--family", metavar="NAME", help=family)


def _report(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="run directory; the run may still be training")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML page")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")


def _plan(parser: Parser) -> None:
    add = parser.add_argument
    add("config", nargs="?", help="YAML file")
    _add_common(parser, "overrides")
    add("--target", metavar="T", help="hardware: h100:64x8 (nodes x GPUs), v5p:8x8x8, simulate:8, local, ...")
    add("--slices", type=int, metavar="N", help="number of TPU slices, joined by the data center's network")
    add("--dcn", metavar="RATE", help="rate at which a replica or an island sends, such as 10Gbit")
    add("--server-dcn", metavar="RATE", help="rate of the link of each server of islands; default: that of an island")
    add("--json", metavar="FILE", help="write the plan, or the comparison, as JSON")
    add("--html", metavar="FILE", help="write the report as one HTML page")
    add("--hlo", metavar="FILE", help="write the text of the compiled program")
    add("--whole", action="store_true", help="compile for all devices, even more than 32,768; never extrapolate")
    add("--diff", nargs=2, metavar=("A", "B"), help="compare two: configs, 'CONFIG key=value ...', or plans (.json)")
    add("--search", action="store_true", help="find the best layout and write it as a layout file")
    add("--objective", metavar="O", help="with --search: minimize time (of a step), memory or cost (of the run)")
    add("--devices", type=int, metavar="N", help="with --search: use N devices of the target")
    add("--budget", metavar="TIME", help="with --search: time limit such as 90s, 5m (the default) or 1h")
    add("--top", type=int, metavar="K", help="with --search: layouts to compile (8); 0: formulas alone")
    add("--jobs", type=int, metavar="N", help="with --search: layouts compiled at the same time (2)")
    add("--out", metavar="FILE", help="with --search: layout file to write (TARGET.yaml)")


def _verify(parser: Parser) -> None:
    _add_common(parser, "config", "overrides")
    parser.add_argument("--layouts", default="all", metavar="A,B", help="layouts to compare with one device (all)")
    parser.add_argument("--simulate", type=int, metavar="N", help="simulated CPU devices (those of the config, else 8)")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="training steps to compare (3)")
    parser.add_argument("--inject", help=argparse.SUPPRESS)


def _schedule(parser: Parser) -> None:
    add = parser.add_argument
    add("schedule", metavar="NAME", nargs="?", help="name of a schedule, or a .csv or .yaml table of your own")
    add("--stages", type=int, metavar="P", help="pipeline stages (4)")
    add("--microbatches", type=int, metavar="M", help="microbatches of a step (8)")
    add("--chunks", type=int, metavar="V", help="model chunks that each stage holds")
    add("--costs", default="1,1,1", metavar="F,B,W", help="times of forward, input gradient and weight gradient")
    add("--compare", action="store_true", help="compare all schedules")
    add("--out", metavar="FILE", help="chart to write, .svg or .png (NAME.svg)")


def _checkpoint(parser: Parser) -> None:
    add = parser.add_argument
    actions = "list all, describe one, check every byte, delete old ones, or go back: set those after --step aside"
    add("action", choices=("ls", "inspect", "verify", "prune", "rewind"), help=actions)
    _add_common(parser, "run")
    add("--step", type=int, action="append", default=[], metavar="N", help="only this step; may be repeated")
    add("--keep", type=int, metavar="N", help="prune: delete all but the newest N and the best")
    add("--dry-run", action="store_true", help="prune: print what would be deleted, delete nothing")
    add("--set-aside", action="store_true", help="prune: delete bad-N and old-N too")
    add("--durable", action="store_true", help="ls, verify: read the copies in checkpoint.durable")
    add("--json", action="store_true", help="ls, inspect: print JSON")


def _config(parser: Parser) -> None:
    _add_common(parser, "config", "overrides")


def _schema(parser: Parser) -> None:
    del parser  # no arguments


def _diff(parser: Parser) -> None:
    parser.add_argument("a", help="config file or RUN_DIR")
    parser.add_argument("b", help="config file or RUN_DIR")


def _data(parser: Parser) -> None:
    actions = "show a batch, build the token cache, or train a BPE tokenizer"
    parser.add_argument("action", choices=("show", "build", "tokenizer"), help=actions)
    _add_common(parser, "config", "overrides")
    parser.add_argument("--step", type=int, default=0, metavar="N", help="show: the batch after N steps (0)")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="show: rows of the batch (2)")
    parser.add_argument("--vocab", type=int, default=8192, metavar="N", help="tokenizer: vocabulary size (8192)")
    parser.add_argument("--out", default="tokenizer.json", metavar="FILE", help="tokenizer: file to write")


def _init(parser: Parser) -> None:
    text = "name of the run and of its files (default: that of the template)"
    parser.add_argument("name", metavar="NAME", nargs="?", help=text)
    kinds = "gpt: a language model by config; classifier: images, your data; own-model: your module on text (gpt)"
    parser.add_argument("--template", choices=("gpt", "classifier", "own-model"), default="gpt", help=kinds)


def _layouts(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="print the file of this layout")


def _doctor(parser: Parser) -> None:
    parser.add_argument("--dir", default=".", metavar="DIR", help="folder that runs are written to (here)")
    timeout = "seconds until a check counts as hanging (30)"
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help=timeout)


def _completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="print the script that this shell reads")
    parser.add_argument("--line", help=argparse.SUPPRESS)  # the script asks for the completions of this line


COMMANDS: dict[str, Command] = {
    "init": Command("onboarding.init", "write a commented config, and a model of your own, to begin with", _init),
    "train": Command("train", "train from a config", _train),
    "resume": Command("resume", "resume a run from its newest good checkpoint", _resume),
    "launch": Command("launch", "train in several processes and restart when some are lost", _launch),
    "islands": Command("islands.status", "print the status of a run of islands, or write its report", _islands),
    "eval": Command("evaluate", "print the validation metrics or the task scores of a checkpoint", _eval),
    "generate": Command("generate", "generate text from a checkpoint or a Hugging Face model", _generate),
    "import": Command("import_hf", "create a run from a Hugging Face model", _import),
    "export": Command("export_hf", "write a checkpoint as a Hugging Face model", _export),
    "report": Command("report", "print the time accounting, curves and restarts of a run", _report),
    "plan": Command("plan", "predict memory, communication and speed of a config on any hardware", _plan),
    "verify": Command("verify", "prove that no layout changes losses and gradients of a config", _verify),
    "layouts": Command("onboarding.layouts", "list the layouts: mesh axes, and when to use each", _layouts),
    "doctor": Command("onboarding.doctor", "check versions, devices, memory, disk, ports and clock here", _doctor),
    "schedule": Command("schedule", "print, price and draw a pipeline schedule", _schedule),
    "checkpoint": Command("checkpoints", "list, describe, verify, delete checkpoints, or go back to one", _checkpoint),
    "config": Command("config", "print the resolved config and the source of each value", _config),
    "schema": Command("config:schema", "print the JSON Schema of the config", _schema),
    "diff": Command("diff", "compare the configs of two files or runs", _diff),
    "data": Command("data", "show a batch, build a token cache or train a tokenizer", _data),
    "completion": Command("onboarding.completion", "print the script that completes commands in a shell", _completion),
}
