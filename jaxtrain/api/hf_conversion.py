"""Conversion between run directories and Hugging Face model folders: weights, config, tokenizer files."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer, CheckpointStore, SaveFailed
from jaxtrain.checkpoint.state_tree import flatten
from jaxtrain.config import Config
from jaxtrain.config.run_dir import absolute, saved_config, write_config
from jaxtrain.config.schema import DataConfig
from jaxtrain.config.show import as_dict
from jaxtrain.core.components import components_of
from jaxtrain.core.layout_check import check_config
from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.core.state import all_parameters, split_parameters
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.data.tokenizer_files import AUXILIARY_FILES, copy_files, token_ids, write_tokenizer
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError, format_value
from jaxtrain.inference.model import WITHOUT_ROUNDS, load_params
from jaxtrain.interop.config_json import choose_export_family, read_json, read_model_config
from jaxtrain.interop.hub import model_folder
from jaxtrain.interop.load_weights import load_weights
from jaxtrain.interop.save_weights import save_weights
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
from jaxtrain.models.spec import is_decoder
from jaxtrain.reports.layout_table import format_bytes
from jaxtrain.trainer.compatibility import environment

ORIGIN = "huggingface"  # folder in an imported run with the files of the original model
NO_IDS = {"bos_token_id": None, "eos_token_id": None}  # transformers takes a field that is missing for 1 or 2
MAX_SEQUENCE = 1024  # tokens; limits the default `data.sequence` of an imported run
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Exported:
    """Result of an export.

    Attributes:
        family: architecture, as `model_type` of config.json.
        step: step of the checkpoint.
        bytes: bytes of the tensors.
        dtype: their dtype.
        tokens: number of tokens of the tokenizer; None if none was written.
        rows: rows of the embedding table.
    """

    family: str
    step: int
    bytes: int
    dtype: str
    tokens: int | None
    rows: int

    def __str__(self) -> str:
        return f"{self.family} of step {self.step}, {format_bytes(self.bytes)} of {self.dtype}"

    @property
    def notes(self) -> list[str]:
        """Lines about a tokenizer that is missing or smaller than the model's vocabulary."""
        if self.tokens is None:
            return [
                "no tokenizer: the run has none that jaxtrain reads; add the files of yours before text is generated"
            ]
        if self.tokens == self.rows:
            return []
        known, padding = f"{self.tokens:,} tokens", f"{self.rows - self.tokens:,} rows of padding, never generated"
        return [f"vocabulary of {self.rows:,}: {known}, and {padding}"]


def import_model(source: str | Path, to: str | Path, *overrides: str) -> Config:
    """Creates a run directory with the weights of a Hugging Face model as step 0. Returns its config.

    Args:
        source: folder of the model, or its name on the Hub, such as `meta-llama/Llama-3.2-1B`.
        to: run directory to create.
        overrides: `key=value` texts.

    Raises:
        UserError: not a model, an unsupported architecture, weights that do not fit it, or `to` exists.
    """
    source, target = model_folder(source), Path(to)
    family, section = read_model_config(source)
    with _new_folder(target) as folder:
        base = {"model": section, **_run_settings(source, target)}
        config, _ = resolve(None, *overrides, base=base, paths=False, checks=[check_config])
        program = build_program(config, section["vocab"], _devices(config))
        loaded = load_weights(source, TENSOR_MAPPINGS[family.name], all_parameters(program.one))
        copy_files(source, folder / ORIGIN, ("config.json", *AUXILIARY_FILES))
        write_config(folder, config)
        manifest = environment(as_dict(absolute(config)), program.sharder.mesh, imported=str(source.absolute()))
        state = split_parameters(loaded, program.one)
        state["step"] = jax.device_put(jnp.zeros((), jnp.int32), program.one["step"].sharding)
        with Checkpointer(folder / "checkpoints", waits=()) as checkpoints:  # nothing else is logged meanwhile
            checkpoints.save(0, state, manifest=manifest, copy=False)
            checkpoints.wait()
            failed = [event for event in checkpoints.poll() if isinstance(event, SaveFailed)]
        if failed:
            raise UserError(f"{target}: {failed[0].reason}")
    return config


def export(
    run: str | Path, to: str | Path, *overrides: str, step: int | None = None, dtype: str | None = None,
    shard_size: str = "5GB", family: str | None = None, **objects: Any,
) -> Exported:  # fmt: skip
    """Writes a checkpoint as a Hugging Face model: its weights, the EMA weights if it has any, and its tokenizer.

    Args:
        run: run directory.
        to: folder to create.
        overrides: `key=value` texts, such as another layout.
        step: step of the checkpoint; default: the newest good one.
        dtype: name of the files' dtype; default: as stored.
        shard_size: largest size of a file.
        family: `model_type` to write; default: that of the imported model, else the first that fits.
        objects: `optimizer` of a run of Python objects.

    Raises:
        UserError: not a run, no usable checkpoint, no architecture fits the model, its tokenizer cannot be read, or
            `to` exists.
    """
    directory, target = Path(run), Path(to)
    max_bytes = _bytes(shard_size)
    config, _ = resolve(saved_config(directory), *overrides, *WITHOUT_ROUNDS, paths=False, checks=[check_config])
    if not is_decoder(config.model):
        raise UserError(f"{directory}: model {config.model.type} has no Hugging Face architecture")
    store = CheckpointStore(directory / "checkpoints")
    newest = store.latest() if step is None else step
    tensors = store.marker(0 if newest is None else newest)["tensors"]
    vocab = (tensors.get("params/embed/table") or tensors["frozen/embed/table"])[0][-2]  # after a replica dim
    origin = directory / ORIGIN
    original = read_json(origin / "config.json") if (origin / "config.json").is_file() else None
    architecture, content = choose_export_family(config.model, vocab, family, original)
    source = _tokenizer_source(config.data, origin)
    tokenizer = None if source is None else load_tokenizer(source)
    if tokenizer is not None and source != str(origin / "tokenizer.json"):
        content |= token_ids(tokenizer)
    elif tokenizer is None and original is None:
        content |= NO_IDS
    with _new_folder(target) as folder:
        program = build_program(config, vocab, _devices(config), components=components_of(export, objects))
        params, done = load_params(directory, step, program)
        flat = flatten(params)
        kind = np.dtype(dtype or flat["embed/table"].dtype)
        size = save_weights(folder, TENSOR_MAPPINGS[architecture.name], flat, kind, max_bytes)
        (folder / "config.json").write_text(json.dumps({**content, "torch_dtype": kind.name}, indent=2) + "\n")
        if tokenizer is None or source is None:
            copy_files(origin, folder)
        else:
            write_tokenizer(folder, tokenizer, source, vocab)
    return Exported(architecture.name, done, size, kind.name, None if tokenizer is None else tokenizer.vocab, vocab)


def _tokenizer_source(data: DataConfig, origin: Path) -> str | None:
    """Returns `bytes` or the path of the tokenizer.json of a run; None if it has no tokenizer that can be read.

    Those are a user's own data, and imported models without a tokenizer.json. The path of an imported one is the
    present one, even if the run directory was moved.
    """
    if not data.is_text or (data.tokenizer == "bytes" and origin.is_dir()):
        return None
    file = origin / "tokenizer.json"
    return str(file) if Path(data.tokenizer).parent.name == ORIGIN and file.is_file() else data.tokenizer


def _run_settings(source: Path, target: Path) -> dict[str, Any]:
    """Returns the config of an imported run without its `model` section."""
    settings = read_json(source / "config.json")
    longest = settings.get("max_position_embeddings", settings.get("n_positions"))
    sequence = min(MAX_SEQUENCE, longest) if isinstance(longest, int) and longest > 0 else MAX_SEQUENCE
    data: dict[str, Any] = {"sequence": sequence}
    if (source / "tokenizer.json").is_file():
        data["tokenizer"] = str(target.absolute() / ORIGIN / "tokenizer.json")
    name = re.sub(r"[^\w.\-]", "_", target.absolute().name).lstrip(".-") or "run"
    return {"name": name, "dir": str(target.absolute().parent), "data": data}


@contextmanager
def _new_folder(target: Path) -> Generator[Path]:
    """Yields a temporary folder that is renamed to `target` at the end, or deleted after an error."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{target} already exists; expected the name of a new folder")
    target.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = target.absolute().with_name(f".{target.name}.{os.getpid()}.tmp")
    folder.mkdir()
    try:
        with _deleted_on_signals(folder):
            yield folder
        os.replace(folder, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _deleted_on_signals(folder: Path) -> Generator[None]:
    """Deletes the folder also on SIGINT and SIGTERM, which end the process at once."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def delete_and_exit(number: int, frame: Any) -> None:
        for _ in range(100):  # threads that write a checkpoint may create more files
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.01)
            if not folder.exists():
                break
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        os._exit(128 + number)

    for number in before:
        signal.signal(number, delete_and_exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _devices(config: Config) -> list[Any]:
    if runtime.process_count() > 1:
        raise UserError(
            f"import and export run in one process; expected {runtime.PROCESSES}=1, found {runtime.process_count()}"
        )
    return runtime.start(config.simulate)


def _bytes(text: str) -> int:
    """Parses a size such as `5GB`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip().upper())
    if match is None or float(match[1]) == 0:
        raise UserError(f"--shard-size: expected a size such as 5GB or 500MB; found {format_value(text)}")
    return int(float(match[1]) * UNITS[match[2]])
