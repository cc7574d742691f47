"""No input file, however broken, ends in a traceback, takes long or needs much memory: it is read or refused in a line.

JAXTRAIN_FUZZ=20000 tries so many mutations of each file, where `make test` tries 150.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import resource
import struct
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from mutations import mutate

from jaxtrain.checkpoint.files import parse_marker, write_marker
from jaxtrain.checkpoint.memory import protocol as memory_protocol
from jaxtrain.data import megatron
from jaxtrain.data.sources import base
from jaxtrain.data.sources.base import File
from jaxtrain.data.sources.formats import plan_shards, read_shard
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import DataError, PeerMemoryError, ProtocolError, UserError
from jaxtrain.hlo import parse as hlo
from jaxtrain.interop import config_json, safetensors_io
from jaxtrain.io.authenticated import Session
from jaxtrain.io.jsonl import read_records
from jaxtrain.launch import protocol
from jaxtrain.launch.leadership.state import LeaderState
from jaxtrain.pipeline.schedules.files import load_table

TRIES = int(os.environ.get("JAXTRAIN_FUZZ", "150"))
SECONDS = 5.0  # of processor time for one input
MEMORY = 1 << 30  # bytes that one parser may add to this process
REFUSALS = (UserError, ProtocolError, PeerMemoryError)


class Parser(NamedTuple):
    """A valid input and what reads it. `refusals`: further errors that its callers handle."""

    valid: Callable[[], bytes]
    read: Callable[[Path], Any]
    name: str = "file"
    refusals: tuple[type[Exception], ...] = ()


def documents(kind: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        file = File(path.name, str(path), kind, path.stat().st_size)
        return [list(read_shard(shard, "text")) for shard in plan_shards([file], 1 << 20)]

    return read


def jsonl() -> bytes:
    return b"".join(json.dumps({"text": f"line {i} é", "n": i}).encode() + b"\n" for i in range(20))


def tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for index in range(4):
            info = tarfile.TarInfo(f"{index}.txt")
            info.size = 5
            archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


def parquet() -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    pq.write_table(pa.table({"text": [f"row {i}" for i in range(50)]}), out)
    return out.getvalue()


def arrow() -> bytes:
    pa = pytest.importorskip("pyarrow")
    out = io.BytesIO()
    table = pa.table({"text": [f"row {i}" for i in range(50)]})
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def zst() -> bytes:
    return pytest.importorskip("zstandard").compress(jsonl())


def index() -> bytes:
    header = megatron.HEADER.pack(megatron.MAGIC, 1, 8, 3, 3)
    return header + struct.pack("<3i", 4, 5, 6) + struct.pack("<3q", 0, 8, 18) + struct.pack("<3q", 0, 1, 3)


def safetensors() -> bytes:
    from safetensors.numpy import save

    return save({"a": np.zeros((3, 4), np.float32), "b": np.ones(5, np.float16)})


def read_safetensors(path: Path) -> Any:
    return {name: tensor.shape for name, tensor in safetensors_io.open_file(path).items()}


def tokenizer() -> bytes:
    vocab = {chr(97 + i): i for i in range(26)} | {"<eos>": 26, "ab": 27}
    added = [{"id": 26, "content": "<eos>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False}]  # fmt: skip
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]}
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model}).encode()


def model_config() -> bytes:
    return json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128, "hidden_act": "silu",
        "tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }).encode()  # fmt: skip


def marker(folder: Path) -> bytes:
    content = {"format": 1, "step": 4, "time": 1.0, "bytes": 3, "files": {"state/a": [3, "ff"]},
               "tensors": {"a": [[3], "float32"]}, "manifest": {}, "metrics": {}}  # fmt: skip
    write_marker(folder, content)
    return (folder / "jaxtrain.json").read_bytes()


def message() -> bytes:
    return protocol.encode("exit", generation=3, rank=1, pid=7, code=-9, is_ended_by_jax=False)


def leader_state() -> bytes:
    denylist = {"slots": [], "nodes": [], "slot_failures": [], "node_failures": []}
    members, cause = [[0, 0], [1, 0]], ["text", 1, [0, 0]]
    state = LeaderState(1.0, "RUNNING", None, 3, 1, members, cause, None, None, 1, 1.0, 4, 4, -1, 2, denylist)
    return state.as_text().encode()


def handshake() -> bytes:
    return Session("a secret", "launch", is_server=False).outgoing() + bytes(64)


def take(path: Path) -> Any:
    session, data = Session("a secret", "launch", is_server=True, limit=1 << 16), path.read_bytes()
    while len(data) >= session.wanted:
        part, data = data[: session.wanted], data[session.wanted :]
        session.take(part)
        session.outgoing()


def header() -> bytes:
    piece = {"name": "a", "start": [0, 0], "shape": [2, 3], "offset": 0, "size": 24, "digest": "ff"}
    fields = {"processes": 2, "size": 24, "tensors": {"a": [[4, 3], "float32"]}, "manifest": {}, "pieces": [piece]}
    return json.dumps(fields).encode()


HLO = b"""HloModule jit_f, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main (p: f32[8,4]) -> f32[8,8] {
  %p = f32[8,4]{1,0} parameter(0)
  %a = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/psum"}
  %t = (f32[8,4]{1,0}, s32[]) tuple(%a, %a)
  ROOT %d = f32[8,8]{1,0} dot(%a, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""

PARSERS = {
    "jsonl": Parser(jsonl, documents("jsonl"), "a.jsonl"),
    "jsonl.gz": Parser(lambda: gzip.compress(jsonl(), mtime=0), documents("jsonl"), "a.jsonl.gz"),
    "jsonl.zst": Parser(zst, documents("jsonl"), "a.jsonl.zst"),
    "text": Parser(lambda: "héllo\nworld\n".encode(), documents("text"), "a.txt"),
    "tar": Parser(tar, documents("webdataset"), "a.tar"),
    "parquet": Parser(parquet, documents("parquet"), "a.parquet"),
    "arrow": Parser(arrow, documents("arrow"), "a.arrow"),
    "megatron": Parser(index, lambda path: megatron.read_index(str(path), 30), "a.idx"),
    "safetensors": Parser(safetensors, read_safetensors, "model.safetensors"),
    "tokenizer": Parser(tokenizer, lambda path: load_tokenizer(str(path)).encode_batch(["ab"]), "tokenizer.json"),
    "config.json": Parser(model_config, lambda path: config_json.read_model_config(path.parent), "config.json"),
    "records": Parser(jsonl, lambda path: list(read_records(path)), "metrics.jsonl"),
    "marker": Parser(lambda: b"", lambda path: parse_marker(path.read_bytes()), "jaxtrain.json"),
    "launch message": Parser(message, lambda path: protocol.decode(path.read_bytes())),
    "leader state": Parser(leader_state, lambda path: LeaderState.from_text(path.read_text()), refusals=(ValueError,)),
    "handshake": Parser(handshake, take),
    "memory header": Parser(header, lambda path: memory_protocol.parse_header(json.loads(path.read_bytes())),
                            refusals=(ValueError, RecursionError)),
    "schedule.csv": Parser(lambda: b"F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n",
                           lambda path: load_table(str(path), None, None, None), "a.csv"),
    "hlo": Parser(lambda: HLO, lambda path: hlo.parse(path.read_text(errors="replace")), refusals=(ValueError,)),
}  # fmt: skip


def check(parser: Parser, path: Path, data: bytes) -> None:
    """Reads an input: within its limits, and either well or with one line."""
    path.write_bytes(data)
    begun, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal = ""
    try:
        parser.read(path)
    except REFUSALS as error:
        refusal = str(error)
    except parser.refusals:
        pass
    lines = refusal.splitlines()
    assert len([line for line in lines if not line.startswith(str(path))]) <= 1, refusal  # or a line for each problem
    assert len(refusal) < 2000 * max(1, len(lines)), refusal[:200]
    assert time.process_time() - begun < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < MEMORY


@pytest.mark.parametrize("name", PARSERS)
def test_a_broken_input_is_refused_in_one_line(name: str, tmp_path: Path):
    parser, rng = PARSERS[name], random.Random(zlib.crc32(name.encode()))
    valid = marker(tmp_path) if name == "marker" else parser.valid()
    path = tmp_path / parser.name
    path.write_bytes(valid)
    if name != "handshake":  # of which the last part is not that of a peer
        parser.read(path)
    for number in range(TRIES):
        data = mutate(valid, rng)
        try:
            check(parser, path, data)
        except Exception as error:
            error.add_note(f"try {number} of {name}: {data[:400]!r}")
            raise


# What mutations found: an error that is none of a broken file, or a line without an end.
FOUND = {
    "tokenizer": tokenizer().replace(b'["a", "b"]', b'["a", ""]'),
    "config.json": model_config().replace(b'["LlamaForCausalLM"]', b"64"),
    "memory header": header().replace(b'"start": [0, 0]', b'"start": [0, 1e999]'),
    "hlo": HLO.split(b"f32[8,4]{1,0} all-reduce")[0],
    "records": b'{"a":' * 3000 + b"\n",
    "jsonl": b'{"' + b"n" * 100_000 + b'": "text"}\n',
    "leader state": b"[" * 3000,
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_found(name: str, tmp_path: Path):
    check(PARSERS[name], tmp_path / PARSERS[name].name, FOUND[name])


@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz", "jsonl.zst", "tar"])
def test_a_file_that_unpacks_to_more_than_a_document_is_refused(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(base, "MAX_DOCUMENT", 1 << 20)
    large = b"0" * ((1 << 20) + 1)
    if name == "tar":
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            info = tarfile.TarInfo("a.txt")
            info.size = len(large)
            archive.addfile(info, io.BytesIO(large))
        data = out.getvalue()
    else:
        pack = {"jsonl.gz": gzip.compress, "jsonl.zst": lambda data: pytest.importorskip("zstandard").compress(data)}
        data = pack.get(name, bytes)(large)
    path = tmp_path / PARSERS[name].name
    path.write_bytes(data)
    with pytest.raises(DataError, match="1048576"):
        PARSERS[name].read(path)
