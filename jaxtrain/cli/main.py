"""The command line. Nothing here imports JAX, pydantic or rich before a command needs it: `--help` is instant."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from keyword import iskeyword

from jaxtrain.exit_codes import ERROR, INTERRUPTED, USAGE

Parser = argparse.ArgumentParser


def _overrides(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="config values, e.g. layout=tp mesh.model=4")


def _simulate(parser: Parser) -> None:
    parser.add_argument("--simulate", type=int, metavar="N", help="run on N simulated CPU devices")


def _looking_on(parser: Parser) -> None:
    parser.add_argument("--profile", metavar="START:STOP", help="write an XProf trace of these steps")
    hang = "end the process (exit code 70) when a step or its data hang so long; default: as measured; 0: never"
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help=hang)
    parser.add_argument("--verbose", action="store_true", help="print the layout of every parameter")


def _train(parser: Parser) -> None:
    parser.add_argument("config", help="YAML file")
    _overrides(parser)
    _simulate(parser)
    _looking_on(parser)


def _resume(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    _overrides(parser)
    _simulate(parser)
    _looking_on(parser)


def _checkpoint(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    _overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to read; default: the newest good one")
    _simulate(parser)


def _checkpoints(parser: Parser) -> None:
    parser.add_argument("action", choices=("ls", "inspect", "verify", "prune"), help="list, describe, read, delete")
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--step", type=int, action="append", default=[], metavar="N", help="this one; may be repeated")
    parser.add_argument("--keep", type=int, metavar="N", help="prune: delete all but the newest N and the best")
    parser.add_argument("--dry-run", action="store_true", help="prune: say what would go, delete nothing")
    parser.add_argument("--set-aside", action="store_true", help="prune: delete bad-N and old-N too")
    parser.add_argument("--durable", action="store_true", help="ls, verify: the copies in checkpoint.durable")
    parser.add_argument("--json", action="store_true", help="ls, inspect: as JSON")


def _eval(parser: Parser) -> None:
    _checkpoint(parser)
    parser.add_argument("--batches", type=int, metavar="N", help="validation batches; default: the config's")
    parser.add_argument("--tasks", metavar="A,B", help="tasks of the lm-evaluation-harness instead of validation")
    parser.add_argument("--include-path", metavar="DIR", help="of --tasks: folder with more task files (YAML)")
    parser.add_argument("--limit", type=int, metavar="N", help="of --tasks: documents of each at most")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="of --tasks: examples before each document")
    parser.add_argument("--out", metavar="FILE", help="write what is printed as JSON")


def _generate(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run, or of a Hugging Face model")
    _overrides(parser)
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to read; default: the newest good one")
    _simulate(parser)
    parser.add_argument("--prompt", action="append", default=[], help="text to go on from; may be given several times")
    parser.add_argument("--prompts", metavar="FILE", help="more of them, one per line")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="tokens at most (128)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (0.8)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to probability P")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (0)")


def _import(parser: Parser) -> None:
    parser.add_argument("model", metavar="HF_DIR", help="folder with config.json and safetensors files")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder of the run to make")
    _overrides(parser)
    _simulate(parser)


def _export(parser: Parser) -> None:
    _checkpoint(parser)
    parser.add_argument("--to", required=True, metavar="HF_DIR", help="folder to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the files; default: as stored")
    parser.add_argument("--shard-size", default="5GB", metavar="SIZE", help="of a file at most (5GB)")
    parser.add_argument("--family", metavar="NAME", help="model_type; default: as imported, else the first that fits")


def _config(parser: Parser) -> None:
    parser.add_argument("config", help="YAML file")
    _overrides(parser)


def _schema(parser: Parser) -> None:
    del parser  # takes nothing


def _diff(parser: Parser) -> None:
    parser.add_argument("a", help="config file or RUN_DIR")
    parser.add_argument("b", help="config file or RUN_DIR")


def _data(parser: Parser) -> None:
    parser.add_argument("action", choices=("build", "tokenizer"), help="build a token cache or train a BPE tokenizer")
    parser.add_argument("config", help="YAML file")
    _overrides(parser)
    parser.add_argument("--vocab", type=int, default=8192, metavar="N", help="tokenizer: vocabulary size (8192)")
    parser.add_argument("--out", default="tokenizer.json", metavar="FILE", help="tokenizer: file to write")


def _verify(parser: Parser) -> None:
    parser.add_argument("config", help="YAML file")
    _overrides(parser)
    parser.add_argument("--layouts", default="all", metavar="A,B", help="layouts to try (all)")
    parser.add_argument("--simulate", type=int, default=8, metavar="N", help="simulated CPU devices (8)")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="training steps to compare (3)")
    parser.add_argument("--inject", help=argparse.SUPPRESS)


def _plan(parser: Parser) -> None:
    parser.add_argument("config", nargs="?", help="YAML file")
    _overrides(parser)
    parser.add_argument("--target", metavar="T", help="h100:64x8 (nodes x GPUs), v5p:8x8x8, simulate:8, local, ...")
    parser.add_argument("--slices", type=int, metavar="N", help="TPU slices that the data center's network joins")
    parser.add_argument("--json", metavar="FILE", help="write the plan, or the comparison, as JSON")
    parser.add_argument("--html", metavar="FILE", help="write the report as one page")
    parser.add_argument("--hlo", metavar="FILE", help="write the compiled program's text")
    parser.add_argument("--whole", action="store_true", help="compile for more than 32,768 devices too, not for fewer")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="compare two: configs, 'CONFIG key=value ...', or plans (.json)"
    )
    parser.add_argument("--search", action="store_true", help="find the best layout, and write it as a layout file")
    parser.add_argument("--objective", metavar="O", help="of --search: time (of a step), memory or cost (of the run)")
    parser.add_argument("--devices", type=int, metavar="N", help="of --search: so many of the target's")
    parser.add_argument("--budget", metavar="TIME", help="of --search: 90s, 5m (the default) or 1h for all of it")
    parser.add_argument("--top", type=int, metavar="K", help="of --search: layouts to compile (8); 0: formulas alone")
    parser.add_argument("--jobs", type=int, metavar="N", help="of --search: compilers at a time (2)")
    parser.add_argument("--out", metavar="FILE", help="of --search: the layout file (TARGET.yaml)")


def _report(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run, which may go on meanwhile")
    parser.add_argument("--html", metavar="FILE", help="write the report as one page")
    parser.add_argument("--json", metavar="FILE", help="write its figures as JSON")


def _schedule(parser: Parser) -> None:
    parser.add_argument("schedule", metavar="NAME", nargs="?", help="schedule, or a .csv or .yaml table of one's own")
    parser.add_argument("--stages", type=int, metavar="P", help="pipeline stages (4)")
    parser.add_argument("--microbatches", type=int, metavar="M", help="microbatches of a step (8)")
    parser.add_argument("--chunks", type=int, metavar="V", help="parts of the model that each stage holds")
    parser.add_argument(
        "--costs", default="1,1,1", metavar="F,B,W", help="of a stage: forward, input gradient, weights"
    )
    parser.add_argument("--compare", action="store_true", help="set all schedules side by side")
    parser.add_argument("--out", metavar="FILE", help="chart to write, .svg or .png (NAME.svg)")


def _launch(parser: Parser) -> None:
    from jaxtrain.cli.launch import arrange

    arrange(parser)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "train": ("train from a config", _train),
    "resume": ("go on from the newest good checkpoint of a run", _resume),
    "launch": ("train in several processes, and go on when some are lost", _launch),
    "eval": ("validation loss of a checkpoint, or its scores on tasks", _eval),
    "generate": ("text from a checkpoint", _generate),
    "import": ("make a run's folder of a Hugging Face model", _import),
    "export": ("make a Hugging Face model of a checkpoint", _export),
    "report": ("where the time of a run went, its curves, its restarts and their causes", _report),
    "plan": ("memory, communication and speed of a config on hardware that need not be there", _plan),
    "verify": ("prove that no layout changes the losses and gradients of a config", _verify),
    "schedule": ("print, price and draw a pipeline schedule", _schedule),
    "checkpoint": ("list, describe, verify or delete the checkpoints of a run", _checkpoints),
    "config": ("print the resolved config and where each value came from", _config),
    "schema": ("print the JSON Schema of the config", _schema),
    "diff": ("compare two configs or runs", _diff),
    "data": ("build a token cache or train a tokenizer", _data),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    0 done, 1 failed, 2 bad input, 70 hung, 75 stopped by a signal and saved.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else USAGE
    name = arguments[0]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"commands: {', '.join(COMMANDS)}"
        print(f"jaxtrain: no command `{name}`; {hint}", file=sys.stderr)
        return USAGE
    description, arrange = COMMANDS[name]
    parser = Parser(prog=f"jaxtrain {name}", description=description)
    arrange(parser)
    try:
        args = parser.parse_intermixed_args(arguments[1:])
    except SystemExit as stop:
        return int(stop.code or 0)
    args.is_all = argv is None  # the process is this command's alone
    return _run(name, args)


def _run(name: str, args: argparse.Namespace) -> int:
    # Until a command takes over, Ctrl-C ends the process at once: as an exception it could be swallowed, or crash,
    # inside the import of a compiled library.
    signal.signal(signal.SIGINT, _interrupted)
    from jaxtrain.cli import commands

    try:
        return getattr(commands, name + "_" * iskeyword(name))(args)  # `import` can be no function's name
    except KeyboardInterrupt:  # from a command that ends its own processes first
        print("jaxtrain: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # e.g. `| head`: not an error
        return 0
    except commands.UserError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"jaxtrain: {where}{error.strerror or error}", file=sys.stderr)
        return ERROR


def _interrupted(number: int, frame: object) -> None:
    del number, frame
    cursor = b"\033[?25h" if os.isatty(2) else b""  # a progress bar has hidden it
    os.write(2, cursor + b"\njaxtrain: interrupted\n")
    os._exit(INTERRUPTED)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {description}" for name, (description, _) in COMMANDS.items())
    title = "usage: jaxtrain COMMAND [...]\n\nTrain Flax models on any device mesh from a typed config."
    return f"{title}\n\n{rows}\n\nCOMMAND --help tells more."


if __name__ == "__main__":
    sys.exit(main())
