"""Entry point of the command line: parses the arguments and runs the module of the command.

Imports nothing heavy before a command runs: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from jaxtrain.cli.arguments import COMMANDS
from jaxtrain.cli.examples import EXAMPLES
from jaxtrain.errors import UserError, did_you_mean
from jaxtrain.exit_codes import ERROR, INTERRUPTED, OK, USAGE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code, see `jaxtrain.exit_codes`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return OK if arguments else USAGE
    name = arguments[0]
    if name in ("-V", "--version"):
        print(_versions())
        return OK
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; expected one of {', '.join(COMMANDS)}"
        if import_module("jaxtrain.config.shipped").find_file(name, None).is_file():
            hint = f"; it is a config: jaxtrain train {' '.join(arguments)}"
        print(f"jaxtrain: unknown command `{name}`{hint}", file=sys.stderr)
        return USAGE
    parser = _parser(name)
    own, command = arguments[1:], []
    if name == "launch" and "--" in own:
        own, command = own[: own.index("--")], own[own.index("--") + 1 :]
    try:
        args, unknown = parser.parse_known_intermixed_args(own)
    except SystemExit as stop:
        return int(stop.code or 0)
    if unknown:
        options = [option for action in parser._actions for option in action.option_strings]
        line = _unknown_option(unknown[0], arguments, hasattr(args, "overrides"), options)
        print(f"jaxtrain: {line}", file=sys.stderr)
        return USAGE
    is_pair = bool(getattr(args, "diff", None))  # of configs, and what stands in the place of one is an override
    if not is_pair and "=" in (getattr(args, "config", None) or "") and not os.path.exists(args.config):
        example = f"jaxtrain {name} quickstart {args.config}"
        print(f"jaxtrain: {args.config}: expected a config before it, as in `{example}`", file=sys.stderr)
        return USAGE
    args.owns_process = argv is None
    if command:
        args.command = command
    return _run(name, args)


class CommandParser(argparse.ArgumentParser):
    """Parser of a command, whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints what is wrong, and where to read more."""
        message = message.replace(", key=value", "")  # argparse lists the overrides, of which there may be none
        lists = message.startswith("the following arguments are required: ")
        message = f"expected {message.partition(': ')[2]}" if lists else message
        examples = EXAMPLES.get(self.prog.partition(" ")[2], ())
        hint = f", as in `{self.prog} {examples[0]}`" if lists and examples else f"; `{self.prog} --help` describes all"
        self.exit(USAGE, f"{self.prog}: {message}{hint}\n")


def _parser(name: str) -> CommandParser:
    command = COMMANDS[name]
    examples = [f"  jaxtrain {name} {example}".rstrip() for example in EXAMPLES[name]]
    text = "\n".join(["examples:" if len(examples) > 1 else "example:", *examples])
    as_written = argparse.RawDescriptionHelpFormatter
    parser = CommandParser(f"jaxtrain {name}", None, command.help, text, formatter_class=as_written)
    command.add_arguments(parser)
    return parser


def _versions() -> str:
    metadata = import_module("jaxtrain.io.packages")
    jax = metadata.installed_version("jax") or "absent"
    return f"jaxtrain {import_module('jaxtrain').__version__}, jax {jax}, Python {sys.version.split()[0]}"


def _unknown_option(argument: str, arguments: Sequence[str], takes_config: bool, options: Sequence[str]) -> str:
    """Returns the error line for an unknown argument: if it is a config key, how to write it as `key=value`."""
    option, _, value = argument.partition("=")
    key = import_module("jaxtrain.config.key_names").find_key(option.removeprefix("--")) if takes_config else None
    if key is None or not option.startswith("--"):
        hint = did_you_mean(option, options) or f"; `jaxtrain {arguments[0]} --help` describes all"
        return f"unrecognized argument: {argument}{hint}"
    if "`" in key:  # no single key
        return f"{option} is no option; jaxtrain calls it {key}"
    following = [*arguments[arguments.index(argument) + 1 :], "--"][0]
    value = value or (following if not following.startswith("--") else "...")
    return f"{option} is no option; config values are written key=value: {key}={value}"


def _run(name: str, args: argparse.Namespace) -> int:
    # Until a command handles SIGINT, Ctrl-C ends the process at once: as an exception it could be swallowed, or crash,
    # inside the import of a compiled library.
    signal.signal(signal.SIGINT, _interrupt)
    try:
        module, _, function = COMMANDS[name].module.partition(":")
        return getattr(import_module(f"jaxtrain.cli.commands.{module}"), function or "run")(args)
    except KeyboardInterrupt:  # from a command that ends its own processes first
        print("jaxtrain: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # e.g. `| head`: not an error
        return OK
    except UserError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return USAGE
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"jaxtrain: {where}{error.strerror or error}", file=sys.stderr)
        return ERROR


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    cursor = b"\033[?25h" if os.isatty(2) else b""  # a progress bar has hidden it
    os.write(2, cursor + b"\njaxtrain: interrupted\n")
    os._exit(INTERRUPTED)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    title = "usage: jaxtrain COMMAND [...]\n\nTrain Flax models on any device mesh from a typed config."
    first = "first steps:\n  jaxtrain init            then: jaxtrain train gpt.yaml\n  jaxtrain train quickstart"
    return f"{title}\n\n{rows}\n\n{first}\n\n`jaxtrain COMMAND --help` describes the arguments of a command."


if __name__ == "__main__":
    sys.exit(main())
