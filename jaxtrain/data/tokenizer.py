"""Tokenizers: bytes and Hugging Face `tokenizer.json` files, and the training of a byte-level BPE."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.sources.base import first_line
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.packages import import_optional

EOS = "<|endoftext|>"  # end-of-document token of `train_bpe`
CONFIG_FILE = "tokenizer_config.json"
MODEL_FILES = ("generation_config.json", "config.json")  # the first with `eos_token_id` says what ends a text
EOS_NAMES = (EOS, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|eot_id|>", "<|im_end|>")


class Tokenizer(Protocol):
    """Interface of tokenizers.

    Attributes:
      name: short name, for file names.
      vocab: ids are in [0, vocab).
      eos: id that ends a document; no text encodes to it.
      bos: id that the tokenizer puts before a text, or None; `encode_batch` leaves it out.
      stops: ids that end a generated text: `eos`, and those of the model that the tokenizer lies beside.
      fingerprint: hex; tokenizers with equal fingerprints encode equally.
    """

    name: str
    vocab: int
    eos: int
    bos: int | None
    stops: frozenset[int]
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, `smallest_dtype(vocab)`[n]. Special tokens in it are plain text."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the ids of a prompt: `bos` if there is one, then the text, in which special tokens are read."""
        ...

    def token_text(self, token: int) -> str:
        """Returns the text of a special token."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids without special tokens; invalid UTF-8 becomes U+FFFD."""
        ...


def smallest_dtype(vocab: int) -> np.dtype:
    """Returns the smallest of uint8, uint16 and uint32 that holds ids below `vocab`."""
    return np.dtype(np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32)


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes, with id 256 as end-of-document token."""

    name = "bytes"
    vocab = 257
    eos = 256
    bos: int | None = None
    stops = frozenset({256})
    fingerprint = "bytes-1"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), np.uint8).astype(np.uint16) for t in texts]

    def encode_prompt(self, text: str) -> list[int]:
        first, *others = text.split(EOS)
        return list(first.encode()) + [token for part in others for token in (self.eos, *part.encode())]

    def token_text(self, token: int) -> str:
        return EOS if token == self.eos else chr(token)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer of a `tokenizer.json`, by the tokenizers library. Special tokens in a text are encoded as plain text.

    Raises:
      DataError: unreadable file, or no end-of-document token.
    """

    def __init__(self, path: str | Path) -> None:
        tokenizers = import_optional("tokenizers", f"{path}: a tokenizer.json")
        self._path, file = path, Path(path).expanduser()
        try:
            data = file.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; data.tokenizer is `bytes` or a tokenizer.json") from error
        with _library_errors(path):
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(data.decode())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        name = file.parent.name if file.stem == "tokenizer" else file.stem
        self.name = "".join(c if c.isalnum() else "_" for c in name) or "tokenizer"
        config = read_object(file.with_name(CONFIG_FILE))
        self.eos = ids[_find_eos(file, config, ids)]
        self.vocab = max(ids.values()) + 1
        self.fingerprint = hashlib.sha256(data + f" eos={self.eos}".encode()).hexdigest()[:32]
        self.stops = frozenset({self.eos, *_model_stops(file)})
        self._dtype = smallest_dtype(self.vocab)
        text = self._tokenizer.id_to_token(self.eos)
        with _library_errors(path):
            self.bos: int | None = self._find_bos(config, ids)
            first = self.encode_batch([text, "a b"])[0]
        if self.eos in first:
            message = f"the text {text!r} encodes to the end-of-document token; mark it `special` in this file"
            raise DataError(f"{path}: {message}")

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, self._dtype) for e in encoded]

    @cached_property
    def _prompt_tokenizer(self) -> Any:
        """Returns a copy that reads special tokens in a text."""
        return type(self._tokenizer).from_str(self._tokenizer.to_str())

    def encode_prompt(self, text: str) -> list[int]:
        with _library_errors(self._path):
            ids = self._prompt_tokenizer.encode(text, add_special_tokens=False).ids
        return ids if self.bos is None else [self.bos, *ids]

    def token_text(self, token: int) -> str:
        return self._tokenizer.id_to_token(token)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def _find_bos(self, config: dict[str, Any], ids: dict[str, int]) -> int | None:
        """Returns the id that the post-processor puts before a text, or that `add_bos_token` of the config asks for."""
        plain, processed = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        if processed[:1] != plain[:1]:
            return processed[0]
        return ids.get(_token_text(config.get("bos_token")) or "") if config.get("add_bos_token") is True else None


@contextmanager
def _library_errors(path: str | Path) -> Iterator[None]:
    """Raises DataError in place of what the library raises for a broken file: bare Exception, and Rust's panics."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = f"not a tokenizer.json of the tokenizers library ({first_line(error)})"
        raise DataError(f"{path}: {message}") from error


def _find_eos(file: Path, config: dict[str, Any], ids: dict[str, int]) -> str:
    """Returns the end-of-document token: the one of the config, else a well-known name."""
    for name in (_token_text(config.get("eos_token")), *EOS_NAMES):
        if name in ids:
            return name
    names = ", ".join(EOS_NAMES[:5])
    raise DataError(f"{file}: no end-of-document token (looked for {names} ...); set `eos_token` in {CONFIG_FILE}")


def _model_stops(file: Path) -> list[int]:
    """Returns the ids that end a text by the files of the model beside a tokenizer.json; [] without such files."""
    for name in MODEL_FILES:
        ids = read_object(file.with_name(name)).get("eos_token_id")
        if ids is not None:
            return [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)]
    return []


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object; {} if there is none. Raises DataError."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path}: not a JSON object")
    return content


def _token_text(token: Any) -> str | None:
    """Returns the text of a special token, which may be written as an object; None if it is no text."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def load_tokenizer(spec: str) -> Tokenizer:
    """Loads a tokenizer; `spec` is `bytes` or the path of a tokenizer.json. Raises DataError."""
    return ByteTokenizer() if spec == "bytes" else HuggingFaceTokenizer(spec)


def train_bpe(texts: Iterator[str], vocab: int, out: str | Path) -> Path:
    """Trains a byte-level BPE with the pre-tokenizer of GPT-2 and writes it as a tokenizer.json.

    Args:
      texts: the documents.
      vocab: size, including the 256 bytes and the end-of-document token; at least 257.
      out: path of the file, or a folder for `tokenizer.json`. Written atomically.

    Returns:
      The path of the file.

    Raises:
      DataError: vocab below 257.
    """
    if vocab < 257:
        raise DataError(f"vocabulary of {vocab}: a byte-level BPE has 256 bytes and an end token, so 257 at least")
    tokenizers = import_optional("tokenizers", "training a tokenizer")
    models, pre_tokenizers, decoders = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.decoders
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path = Path(out).expanduser()
    path = path if path.suffix == ".json" else path / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, tokenizer.to_str(pretty=True))
    return path
