"""`jaxtrain generate RUN_DIR`: prints prompts with their continuations; streams a single one."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.cli.setup import config_overrides, prepare_jax_import
from jaxtrain.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Runs the command. An empty line separates several prompts."""
    if not 0 <= args.temperature < math.inf or (args.top_p is not None and not 0 < args.top_p <= 1):
        raise UserError("generate: expected a finite --temperature >= 0 and 0 < --top-p <= 1")
    if args.tokens < 1 or (args.top_k is not None and args.top_k < 1):
        raise UserError("generate: expected --tokens and --top-k of at least 1")
    if not 0 <= args.seed < 2**32:
        raise UserError(f"generate: --seed is {args.seed}; expected 0 to 4294967295")
    prompts = _prompts(args)
    prepare_jax_import(args.simulate)
    from jaxtrain.inference.model import complete_prompts, load_model, text_streamer

    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    model = load_model(Path(args.run), args.step, config_overrides(args))
    if len(prompts) == 1:
        _write(text_streamer(*model, **sampling)(prompts[0], args.tokens, args.seed))
        return 0
    for index, text in enumerate(complete_prompts(*model, prompts, args.tokens, args.seed, **sampling)):
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
    if not prompts or not all(prompts):
        what = "a prompt is empty" if prompts else "no prompt; give --prompt TEXT or --prompts FILE"
        raise UserError(f"generate: {what}; expected at least one character, such as a newline")
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
