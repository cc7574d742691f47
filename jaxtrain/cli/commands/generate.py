"""`jaxtrain generate RUN_DIR`: prints prompts with their continuations; streams a single one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import jaxtrain
from jaxtrain.cli.setup import config_overrides, prepare_jax_import
from jaxtrain.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Runs the command. An empty line separates several prompts."""
    prompts = _prompts(args)
    prepare_jax_import(args.simulate)
    names = ("tokens", "step", "seed", "temperature", "top_k", "top_p")
    options = {name: getattr(args, name) for name in names}
    if len(prompts) == 1:
        _write(jaxtrain.stream(args.run, prompts[0], *config_overrides(args), **options))
        return 0
    for index, text in enumerate(jaxtrain.generate(args.run, prompts, *config_overrides(args), **options)):
        _write(["\n" if index else "", text])
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """Returns the texts of --prompt and the non-empty lines of the file --prompts."""
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            text = Path(args.prompts).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"--prompts: {args.prompts} is not UTF-8 (byte {error.start + 1}); convert it") from error
        except OSError as error:
            raise UserError(f"--prompts: {args.prompts}: {error.strerror}; expected a text file") from error
        prompts += [line for line in text.split("\n") if line]
    if not prompts:
        raise UserError("generate: no prompt; expected --prompt TEXT or --prompts FILE")
    try:
        "".join(prompts).encode()
    except UnicodeEncodeError as error:  # bytes of the command line that are no UTF-8 arrive as lone surrogates
        raise UserError("generate: --prompt is not UTF-8; expected text in UTF-8") from error
    return prompts


def _write(pieces: Iterable[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
