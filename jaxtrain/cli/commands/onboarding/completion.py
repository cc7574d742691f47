"""`jaxtrain completion SHELL`: prints the script by which a shell completes commands, options, keys and names.

The script asks `jaxtrain completion SHELL --line TEXT`, which prints the completions of the last word of a line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from typing import Any

from jaxtrain.cli.arguments import COMMANDS

SCRIPTS = {
    "bash": """\
# Completion of jaxtrain for bash: `source` this file, or put it into ~/.local/share/bash-completion/completions.
_jaxtrain() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        COMPREPLY+=("$word")
        case "$word" in *[=./]) compopt -o nospace ;; esac
    done < <(jaxtrain completion bash --line "${COMP_LINE:0:$COMP_POINT}" 2>/dev/null)
}
complete -o default -F _jaxtrain jaxtrain""",
    "zsh": """\
#compdef jaxtrain
# Completion of jaxtrain for zsh: put this file as _jaxtrain into a folder of $fpath, or `source` it after compinit.
_jaxtrain() {
    local -a found whole open
    found=("${(@f)$(jaxtrain completion zsh --line "${(j: :)words[1,CURRENT-1]} $PREFIX" 2>/dev/null)}")
    open=(${(M)found:#*[=./]})
    whole=(${found:#*[=./]})
    (( $#whole )) && compadd -- $whole
    (( $#open )) && compadd -S '' -- $open
    (( $#whole + $#open )) || _files
}
if [[ $funcstack[1] == _jaxtrain ]]; then _jaxtrain "$@"; else compdef _jaxtrain jaxtrain; fi""",
    "fish": """\
# Completion of jaxtrain for fish: put this file into ~/.config/fish/completions/jaxtrain.fish.
complete -c jaxtrain -a '(jaxtrain completion fish --line (commandline -cp) 2>/dev/null)'""",
}


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.line is None:
        print(SCRIPTS[args.shell])
        return 0
    words = args.line.split(" ")
    found = completions([word for word in words[:-1] if word], words[-1])
    # bash replaces only the part of a word behind its last `=` or `:`.
    cut = 1 + max(words[-1].rfind("="), words[-1].rfind(":")) if args.shell == "bash" else 0
    print("\n".join(word[cut:] for word in found))
    return 0


def completions(before: list[str], word: str) -> list[str]:
    """Returns the completions of a word of a command line.

    Args:
        before: the words in front of it, `jaxtrain` first.
        word: beginning of the word.
    """
    if len(before) < 2:
        return _starting(word, [*COMMANDS, "--help", "--version"])
    name, given = before[1], before[2:]
    if name not in COMMANDS:
        return []
    parser = argparse.ArgumentParser(add_help=True)
    COMMANDS[name].add_arguments(parser)
    options = {option: action for action in parser._actions for option in action.option_strings}
    if given and given[-1] in options and options[given[-1]].nargs != 0:  # the value of an option
        return _starting(word, map(str, options[given[-1]].choices or ())) or _paths(word)
    if word.startswith("-"):
        return _starting(word, [option for option, action in options.items() if action.help != argparse.SUPPRESS])
    positions = [action for action in parser._actions if not action.option_strings]
    index = _position(given, options)
    action = positions[min(index, len(positions) - 1)] if positions else None
    if action is None or (index >= len(positions) and action.dest != "overrides"):
        return []
    if action.choices:
        return _starting(word, map(str, action.choices))
    if action.dest == "overrides":
        return _override(word)
    return sorted({*_names(name, action.dest, word), *_paths(word)})


def _position(given: list[str], options: dict[str, Any]) -> int:
    """Returns the number of positional arguments among words."""
    values = [
        word for word, previous in zip(given, ["", *given]) if previous not in options or options[previous].nargs == 0
    ]
    return sum(not word.startswith("-") for word in values)


def _names(command: str, argument: str, word: str) -> list[str]:
    """Returns the shipped names that an argument takes."""
    from jaxtrain.config.shipped import config_names, layout_names

    if command == "layouts":
        return _starting(word, layout_names())
    return _starting(word, config_names()) if argument in ("config", "a", "b") else []


def _override(word: str) -> list[str]:
    """Returns the completions of `key=value`: keys up to their next dot, or values."""
    from jaxtrain.config.key_names import all_keys

    key, equals, value = word.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in _starting(value, _values(key))]
    keys = [f"{key}=" for key in all_keys() if key.startswith(word)]
    ends = [key.find(".", len(word)) for key in keys]
    return sorted({key if end < 0 else key[: end + 1] for key, end in zip(keys, ends)})


def _values(key: str) -> list[str]:
    """Returns the values that a config key may have, if there are few."""
    from jaxtrain.config.key_names import json_schema
    from jaxtrain.config.shipped import layout_names

    if key == "layout":
        return layout_names()
    schema = json_schema()
    node: Any = schema
    for part in key.split("."):
        node = node.get("properties", {}).get(part, {})
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if node.get("type") == "boolean":
        return ["true", "false"]
    return [str(value) for value in node.get("enum", ())]


def _paths(word: str) -> list[str]:
    """Returns the folders, and the files of configs, that begin with a word."""
    folder, name = os.path.split(word)
    try:
        entries = list(os.scandir(os.path.expanduser(folder) or "."))
    except OSError:
        return []
    shown = [
        os.path.join(folder, entry.name) + ("/" if entry.is_dir() else "") for entry in entries
        if entry.name.startswith(name) and (name.startswith(".") or not entry.name.startswith("."))
        and (entry.is_dir() or entry.name.endswith((".yaml", ".yml", ".json", ".csv", ".txt")))
    ]  # fmt: skip
    return sorted(shown)


def _starting(word: str, words: Iterable[str]) -> list[str]:
    return [one for one in words if one.startswith(word)]
