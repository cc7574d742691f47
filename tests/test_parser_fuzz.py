"""No input file, however broken, ends in a traceback, takes long or needs much memory: it is read or refused in a line.

JAXTRAIN_FUZZ=20000 tries so many mutations of each file, where `make test` tries 150.
"""

from __future__ import annotations

import functools
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
import xxhash
from mutations import Mutation, mutate, mutate_json, mutate_value

from jaxtrain.checkpoint.files import file_problem, parse_marker, write_marker
from jaxtrain.checkpoint.memory import protocol as memory_protocol
from jaxtrain.data import megatron
from jaxtrain.data.sources import base
from jaxtrain.data.sources.base import File
from jaxtrain.data.sources.formats import plan_shards, read_shard
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import CheckpointError, DataError, PeerMemoryError, ProtocolError, UserError
from jaxtrain.hlo import parse as hlo
from jaxtrain.interop import config_json, safetensors_io
from jaxtrain.interop.families import FAMILIES
from jaxtrain.io.authenticated import Session
from jaxtrain.io.jsonl import read_records, truncate_after
from jaxtrain.launch import protocol
from jaxtrain.launch.leadership.state import LeaderState
from jaxtrain.pipeline.schedules.files import load_table

TRIES = int(os.environ.get("JAXTRAIN_FUZZ", "150"))
SECONDS = 5.0  # of processor time for one input
MEMORY = 1 << 30  # bytes that one parser may add to this process
REFUSALS = (UserError, ProtocolError, PeerMemoryError)


class Parser(NamedTuple):
    """A valid input and what reads it. `refusals`: further errors that its callers handle.

    `read` also asserts what has to be true of an input that is not refused.
    """

    valid: Callable[[], bytes]
    read: Callable[[Path], Any]
    name: str = "file"
    refusals: tuple[type[Exception], ...] = ()
    mutate: Mutation = mutate


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


def read_index(path: Path) -> None:
    size = 30
    index = megatron.read_index(str(path), size)
    assert (index.starts >= 0).all()
    assert (index.lengths > 0).all()
    assert ((index.starts + index.lengths) * index.dtype.itemsize <= size).all()
    assert (np.diff(index.numbers) > 0).all()


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


def whole_tokenizer() -> bytes:
    """Returns a tokenizer.json with a part of every kind."""
    single = [{"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return json.dumps(json.loads(tokenizer()) | {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": "x+"}, "content": "y"},
            {"type": "Strip", "strip_left": True, "strip_right": True}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s"}, "behavior": "Isolated", "invert": False},
            {"type": "Digits", "individual_digits": True}]},
        "post_processor": {
            "type": "TemplateProcessing", "single": single, "pair": [],
            "special_tokens": {"<eos>": {"id": "<eos>", "ids": [26], "tokens": ["<eos>"]}}},
        "truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 2},
        "padding": {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 3, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "a"},
    }).encode()  # fmt: skip


def model_config() -> bytes:
    return json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 128, "hidden_act": "silu",
        "tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }).encode()  # fmt: skip


def config_of(name: str) -> bytes:
    """Returns a config.json of a family, with all fields that it knows."""
    family = FAMILIES[name]
    sizes = {"num_hidden_layers": 4, "n_layer": 4, "num_attention_heads": 4, "n_head": 4, "num_key_value_heads": 2}
    content = {"model_type": name, "architectures": [family.architecture], "max_position_embeddings": 128}
    content |= {field: sizes.get(field, 64) for field in family.fields} | family.defaults
    if family.window in ("layers", "period"):
        content |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
    if "use_sliding_window" in family.defaults:
        content |= {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    return json.dumps(content).encode()


def weight_index() -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}).encode()


def read_tensors(path: Path) -> Any:
    (path.parent / "x.safetensors").write_bytes(safetensors())
    tensors = safetensors_io.open_tensors(path.parent)
    assert tensors.keys() <= {"a", "b"}
    assert all(tensor.path.parent == path.parent for tensor in tensors.values())
    for name, tensor in tensors.items():
        tensor.check_dtype(name)


def use_tokenizer(path: Path) -> Any:
    made = load_tokenizer(str(path))
    assert made.encode_batch(["ab"])[0].size <= 2
    return made.encode_prompt("ab<eos>"), made.decode([made.eos, 0])


def read_with_config(path: Path) -> Any:
    (path.parent / "tokenizer.json").write_bytes(tokenizer())
    made = load_tokenizer(str(path.parent / "tokenizer.json"))
    assert 0 <= made.eos < made.vocab == 28
    assert made.bos is None or 0 <= made.bos < made.vocab
    return made.encode_prompt("ab<eos>")


def read_marker(path: Path) -> Any:
    content = parse_marker(path.read_bytes())
    for name, (size, checksum) in content["files"].items():
        file_problem(path.parent, name, (size, checksum))
        assert (path.parent / name).resolve().is_relative_to(path.parent.resolve())
    return [(len(shape), kind.strip()) for shape, kind in content["tensors"].values()]


def mutate_marker(data: bytes, rng: random.Random) -> bytes:
    """Returns a marker whose content is changed and has its right digest, or in every third case other bytes."""
    if rng.randrange(3) == 0:
        return mutate(data, rng)
    content = mutate_value(json.loads(data)["content"], rng)
    return signed(content)


def signed(content: Any) -> bytes:
    """Returns a marker with the right digest of its content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({"digest": xxhash.xxh3_64_hexdigest(text.encode()), "content": content}).encode()


def marker(folder: Path) -> bytes:
    content = {"format": 1, "step": 4, "time": 1.0, "bytes": 3, "files": {"state/a": [3, "ff"]},
               "tensors": {"a": [[3], "float32"]}, "manifest": {}, "metrics": {}}  # fmt: skip
    write_marker(folder, content)
    return (folder / "jaxtrain.json").read_bytes()


def message() -> bytes:
    return protocol.encode("exit", generation=3, rank=1, pid=7, code=-9, is_ended_by_jax=False)


def start_message() -> bytes:
    return protocol.encode(
        "start", generation=3, run="run", address="h:1", processes=2, devices_per_process=1, is_simulated=True,
        slots=[0, 1], ranks=[0, 1], memory_every=2, memory_addresses=["h:2"], fence=1, revision=1,
    )  # fmt: skip


def leader_state() -> bytes:
    denylist = {"slots": [], "nodes": [], "slot_failures": [], "node_failures": []}
    members, cause = [[0, 0], [1, 0]], ["text", 1, [0, 0]]
    state = LeaderState(1.0, "RUNNING", None, 3, 1, members, cause, None, None, 1, 1.0, 4, 4, -1, 2, denylist)
    return state.as_text().encode()


def read_state(path: Path) -> None:
    state = LeaderState.from_text(path.read_text())
    same = json.dumps(json.loads(path.read_text()), sort_keys=True)
    assert json.dumps(json.loads(state.as_text()), sort_keys=True) == same


def read_lines(path: Path) -> None:
    for line, record in read_records(path):
        assert record is None or (isinstance(record, dict) and line.endswith(b"\n"))
    truncate_after(path, 10)
    assert all(record is not None and record.get("step") != 19 for _, record in read_records(path))


def records() -> bytes:
    lines = [{"time": "2026-01-01T00:00:00.000+00:00", "step": i, "loss": 0.5, "text": "é"} for i in range(20)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def mutate_records(data: bytes, rng: random.Random) -> bytes:
    """Returns records one of which is changed and still JSON, or in every third case other bytes."""
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(mutate_value(json.loads(lines[at]), rng)).encode() + b"\n"
    return mutate(data, rng) if rng.randrange(3) == 0 else b"".join(lines)


def handshake() -> bytes:
    return Session("a secret", "launch", is_server=False).outgoing() + bytes(64)


def take(path: Path) -> Any:
    session, data = Session("a secret", "launch", is_server=True, limit=1 << 16), path.read_bytes()
    while len(data) >= session.wanted:
        part, data = data[: session.wanted], data[session.wanted :]
        session.take(part)
        session.outgoing()


def read_header(path: Path) -> None:
    header = memory_protocol.parse_header(json.loads(path.read_bytes()))
    for piece in header.pieces:
        assert piece.name in header.tensors
        assert 0 <= piece.size <= piece.offset + piece.size <= header.size


def read_message(path: Path) -> None:
    message = protocol.decode(path.read_bytes())
    assert protocol.decode(protocol.encode(**message)) == message


def read_program(path: Path) -> None:
    """Reads every property of every instruction."""
    for computation in hlo.parse(path.read_text(errors="replace")).computations.values():
        hlo.root(computation)
        for one in computation.values():
            for shape in (one.shape, one.result):
                assert isinstance(shape.bytes, int)
            found = [one.scope, one.custom_call_target, one.chain_id, one.rendezvous, one.collective, one.once_loop]
            found += [one.called, one.branches, one.int_constant, one.parameter_number]
            found += [one.attribute("index"), one.int_list("lhs_contracting_dims")]
            assert found


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
  %a = f32[8,4]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="f/(g()/psum:h)"}
  %t = (f32[8,4]{1,0}, s32[]) tuple(%a, %a)
  ROOT %d = f32[8,8]{1,0} dot(%a, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""

TOKENS = b'{"eos_token": {"content": "<eos>"}, "bos_token": "a", "add_bos_token": true}'

SCHEDULE = b"""placement: loop
microbatches: 2
peak: 2
stages:
- F0 F1 . B0 . B1
- [., F0, B0, F1, B1]
"""

PARSERS = {
    "jsonl": Parser(jsonl, documents("jsonl"), "a.jsonl"),
    "jsonl.gz": Parser(lambda: gzip.compress(jsonl(), mtime=0), documents("jsonl"), "a.jsonl.gz"),
    "jsonl.zst": Parser(zst, documents("jsonl"), "a.jsonl.zst"),
    "text": Parser(lambda: "héllo\nworld\n".encode(), documents("text"), "a.txt"),
    "tar": Parser(tar, documents("webdataset"), "a.tar"),
    "parquet": Parser(parquet, documents("parquet"), "a.parquet"),
    "arrow": Parser(arrow, documents("arrow"), "a.arrow"),
    "megatron": Parser(index, read_index, "a.idx"),
    "safetensors": Parser(safetensors, read_safetensors, "model.safetensors"),
    "tokenizer": Parser(tokenizer, lambda path: load_tokenizer(str(path)).encode_batch(["ab"]), "tokenizer.json",
                        mutate=mutate_json),
    "whole tokenizer": Parser(whole_tokenizer, use_tokenizer, "tokenizer.json", mutate=mutate_json),
    "tokenizer_config.json": Parser(lambda: TOKENS,
                                    read_with_config, "tokenizer_config.json", mutate=mutate_json),
    "weight index": Parser(weight_index, read_tensors, "model.safetensors.index.json", mutate=mutate_json),
    "config.json": Parser(model_config, lambda path: config_json.read_model_config(path.parent), "config.json",
                          mutate=mutate_json),
    **{f"config.json of {name}": Parser(functools.partial(config_of, name),
                                        lambda path: config_json.read_model_config(path.parent), "config.json",
                                        mutate=mutate_json)
       for name in ("gemma2", "gemma3_text", "qwen3", "qwen3_moe", "gpt2")},
    "records": Parser(records, read_lines, "metrics.jsonl", mutate=mutate_records),
    "marker": Parser(lambda: b"", read_marker, "jaxtrain.json", mutate=mutate_marker),
    "launch message": Parser(message, read_message, mutate=mutate_json),
    "launch message of lists": Parser(start_message, read_message, mutate=mutate_json),
    "leader state": Parser(leader_state, read_state, refusals=(ValueError,),
                           mutate=mutate_json),
    "handshake": Parser(handshake, take),
    "memory header": Parser(header, read_header, refusals=(ValueError, RecursionError), mutate=mutate_json),
    "schedule.csv": Parser(lambda: b"F0,F1,,B0,,B1\n,F0,B0,F1,B1,\n",
                           lambda path: load_table(str(path), None, None, None), "a.csv"),
    "schedule.yaml": Parser(lambda: SCHEDULE, lambda path: load_table(str(path), None, None, None), "a.yaml"),
    "hlo": Parser(lambda: HLO, read_program, refusals=(ValueError, RecursionError)),
}  # fmt: skip


def check(parser: Parser, path: Path, data: bytes) -> None:
    """Reads an input: within its limits, and either well or with one line."""
    path.write_bytes(data)
    begun, memory = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
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
    assert time.thread_time() - begun < SECONDS  # of this thread: those of XLA run beside it
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
        data = parser.mutate(valid, rng)
        try:
            check(parser, path, data)
        except Exception as error:
            error.add_note(f"try {number} of {name}: {data[:400]!r}")
            raise


# What mutations found: an error that is none of a broken file, or a line without an end.
FOUND = {
    "tokenizer": tokenizer().replace(b'"merges"', b'"continuing_subword_prefix": "##", "merges"'),
    "whole tokenizer": json.dumps(
        {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    ).encode(),
    "config.json": model_config().replace(b'["LlamaForCausalLM"]', b"64"),
    "memory header": header().replace(b'"start": [0, 0]', b'"start": [0, 1e999]'),
    "records": b'{"a":' * 3000 + b'\n[1]\n"a"\n{"step": "a"}\n{"step": 1}',
    "jsonl": b'{"' + b"n" * 100_000 + b'": "text"}\n',
    "leader state": b"[" * 3000,
    # numbers whose differences and sums overflow
    "megatron": megatron.HEADER.pack(megatron.MAGIC, 1, 8, 3, 4)
    + index()[megatron.HEADER.size : -16]
    + struct.pack("<3q", (1 << 63) - 1, -2, 3),
    "tokenizer_config.json": b'{"eos_token": {"content": [1]}, "bos_token": {}, "add_bos_token": true}',
    "weight index": json.dumps({"weight_map": {"a": "a" * 5000}}).encode(),
    "config.json of gemma2": config_of("gemma2").replace(b'"hidden_size": 64', b'"hidden_size": -1'),
    "config.json of qwen3": config_of("qwen3").replace(b'"num_hidden_layers": 4', b'"num_hidden_layers": null'),
    "config.json of gpt2": config_of("gpt2").replace(b'"gelu_new"', b"{}"),
    "schedule.yaml": b"stages: " + b"[" * 3000,
    "schedule.csv": b"# placement: [\nF0,B0\n",
    "marker": signed(1),
    "hlo": HLO.split(b"f32[8,4]{1,0} all-reduce")[0],
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_stays_found(name: str, tmp_path: Path):
    check(PARSERS[name], tmp_path / PARSERS[name].name, FOUND[name])


@pytest.mark.parametrize("pointers", [(0, 8, (1 << 63) - 2), (0, 8, 20)])
def test_sequences_outside_of_the_tokens_are_refused_also_where_their_end_overflows(tmp_path: Path, pointers):
    path = tmp_path / "a.idx"
    path.write_bytes(index().replace(struct.pack("<3q", 0, 8, 18), struct.pack("<3q", *pointers)))
    with pytest.raises(DataError, match=r"outside of the \.bin"):
        read_index(path)


@pytest.mark.parametrize("digest", ["", None, 0, "0" * 16])
def test_a_marker_without_its_digest_is_refused(tmp_path: Path, digest):
    content = json.loads(marker(tmp_path)) | {"digest": digest}
    with pytest.raises(CheckpointError, match="another checksum"):
        parse_marker(json.dumps(content).encode())


def test_a_schedule_without_microbatch_0_is_refused(tmp_path: Path):
    (tmp_path / "a.csv").write_text("F1,B1\n")
    with pytest.raises(UserError, match="microbatch 0 is missing"):
        load_table(str(tmp_path / "a.csv"))


def test_a_message_of_the_limit_is_taken_and_one_of_a_byte_more_is_not():
    client, server = Session("a secret", "launch", is_server=False), Session("a secret", "launch", True, limit=100)
    server.take(client.outgoing())
    answer = server.outgoing()
    client.take(answer)
    server.take(client.outgoing())
    for part in (b"".join(bytes(part) for part in client.seal(bytes(size))) for size in (100, 101)):
        length, rest = part[: server.wanted], part[server.wanted :]
        if len(rest) == 101 + 32:
            with pytest.raises(ProtocolError, match="101 bytes"):
                server.take(length)
        else:
            server.take(length)
            assert server.take(rest) == bytes(100)


def test_a_piece_that_ends_a_byte_after_its_snapshot_is_refused():
    memory_protocol.parse_header(json.loads(header()))
    with pytest.raises(PeerMemoryError, match="out of range"):
        memory_protocol.parse_header(json.loads(header()) | {"size": 23})


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "", "a//b", "a\0", "\ud800", "a" * 5000 + "/.."])
def test_a_signed_marker_names_no_file_outside_of_its_step(tmp_path: Path, name: str):
    content = json.loads(marker(tmp_path))["content"] | {"files": {name: [3, "ff"]}}
    path = tmp_path / "jaxtrain.json"
    check(PARSERS["marker"], path, signed(content))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        read_marker(path)


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda path: path.symlink_to("/etc/hostname"), "leaves the checkpoint"), (Path.mkdir, "is not a file"),
     (lambda path: path.symlink_to(path.name), "cannot be read"), (os.mkfifo, "is not a file"),
     (Path.touch, "has 0 bytes")],
)  # fmt: skip
def test_what_is_no_file_of_the_step_is_a_problem_and_never_opened(tmp_path: Path, make, problem: str):
    (tmp_path / "step").mkdir()
    make(tmp_path / "step" / "a")
    found = file_problem(tmp_path / "step", "a", (3, "ff")) or ""
    assert problem in found
    assert "\n" not in found


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
