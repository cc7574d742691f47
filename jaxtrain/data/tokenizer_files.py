"""Tokenizer and generation settings of an exported model, in the files that transformers reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer, read_object

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
GENERATION = "generation_config.json"
AUXILIARY_FILES = (GENERATION, *TOKENIZER_FILES)


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the fields of config.json and generation_config.json that say what begins and ends a text."""
    stops = [tokenizer.eos, *sorted(tokenizer.stops - {tokenizer.eos})]
    return {"bos_token_id": tokenizer.bos, "eos_token_id": stops if len(stops) > 1 else tokenizer.eos}


def copy_files(source: Path, target: Path, names: Collection[str] = AUXILIARY_FILES) -> None:
    """Copies the files of these names that exist."""
    target.mkdir(exist_ok=True)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, source: str, rows: int) -> None:
    """Writes the tokenizer of a model: files that lie beside it are copied, and what they lack is added.

    Args:
        folder: the exported model.
        tokenizer: of the model.
        source: where it was loaded from: `bytes`, or the path of a tokenizer.json, which may have any name.
        rows: of the embedding table. Those from `tokenizer.vocab` on only pad it; generation never chooses them.
    """
    file = Path(source).expanduser()
    if isinstance(tokenizer, ByteTokenizer):
        (folder / "tokenizer.json").write_text(_byte_level(tokenizer) + "\n")
    elif file.name == "tokenizer.json":
        copy_files(file.parent, folder)
    else:  # files of other names may belong to another tokenizer
        shutil.copyfile(file, folder / "tokenizer.json")
        copy_files(file.parent, folder, ("tokenizer_config.json",))
    end = tokenizer.token_text(tokenizer.eos)
    texts = {"eos_token": end, "pad_token": end}
    texts |= {} if tokenizer.bos is None else {"bos_token": tokenizer.token_text(tokenizer.bos)}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **texts, "clean_up_tokenization_spaces": False}
    _add(folder / "tokenizer_config.json", config)
    _add(folder / "special_tokens_map.json", texts)
    _write_generation_config(folder / GENERATION, tokenizer, rows)


def _write_generation_config(path: Path, tokenizer: Tokenizer, rows: int) -> None:
    """Writes what ends a text and which ids only pad the vocabulary; a copied file only gets a missing end."""
    ids, settings = token_ids(tokenizer), read_object(path)
    if settings:
        ends = settings.get("eos_token_id")
        if tokenizer.eos not in (ends if isinstance(ends, list) else [ends]):
            path.write_text(json.dumps({**settings, "eos_token_id": ids["eos_token_id"]}, indent=2) + "\n")
        return
    padding = {"suppress_tokens": list(range(tokenizer.vocab, rows))} if tokenizer.vocab < rows else {}
    path.write_text(json.dumps({**ids, "pad_token_id": tokenizer.eos, **padding}, indent=2) + "\n")


def _add(path: Path, defaults: dict[str, Any]) -> None:
    """Adds the fields that a JSON file lacks; a file that lacks none is left as it is."""
    found = read_object(path)
    if defaults.keys() - found.keys():
        path.write_text(json.dumps({**defaults, **found}, indent=2, ensure_ascii=False) + "\n")


def _byte_level(tokenizer: ByteTokenizer) -> str:
    """Returns a tokenizer.json in which every byte is the token of its value."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": tokenizer.eos, "content": tokenizer.token_text(tokenizer.eos), "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [end],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {text: byte for byte, text in enumerate(_byte_texts())}, "merges": []},
        },
        indent=2,
        ensure_ascii=False,
    )


def _byte_texts() -> Iterator[str]:
    """Yields the character by which a byte-level BPE writes each byte.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order (GPT-2,
    Radford et al. 2019).
    """
    others = 0
    for byte in range(256):
        is_printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        yield chr(byte if is_printable else 0x100 + others)
        others += not is_printable
