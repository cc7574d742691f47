"""Every format gives the same tokens in the same order for the same documents, and one-line errors for bad input."""

from __future__ import annotations

import gzip
import io
import json
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data import open_dataset
from jaxtrain.data.sources import documents, list_files, plan_shards, read_shard
from jaxtrain.errors import DataError

TEXTS = [f"document {i} é\u2028\n" * (1 + i % 5) for i in range(120)]


def error(path: Path | str, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        list(documents(SourceConfig(path=str(path), **options)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def jsonl(folder: Path, texts: list[str]) -> SourceConfig:
    folder.mkdir()
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return SourceConfig(path=str(folder))


def parquet(folder: Path, texts: list[str]) -> SourceConfig:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (jaxtrain[data])")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (jaxtrain[data])")
    folder.mkdir()
    pq.write_table(pa.table({"text": texts}), folder / "x.parquet", row_group_size=7)
    return SourceConfig(path=str(folder))


def record_batches(texts: list[str | None]):
    """A table of small record batches, with a column before the text."""
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow (jaxtrain[data])")
    return pa.table({"id": range(len(texts)), "text": texts}).to_batches(max_chunksize=7)


def arrow_stream(folder: Path, texts: list[str]) -> SourceConfig:
    """As `datasets` leaves it after `Dataset.save_to_disk`, its own cache file included."""
    batches = record_batches(texts)
    import pyarrow as pa

    folder.mkdir()
    half = len(batches) // 2
    names = [f"data-{i:05d}-of-00002.arrow" for i in range(2)]
    for name, part in zip([*names, "cache-0123.arrow"], (batches[:half], batches[half:], batches[:1])):
        with pa.ipc.new_stream(folder / name, batches[0].schema) as writer:
            for batch in part:
                writer.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return SourceConfig(path=str(folder))


def arrow_splits(folder: Path, texts: list[str]) -> SourceConfig:
    folder.mkdir()
    arrow_stream(folder / "train", texts)
    arrow_stream(folder / "test", texts[:3])
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return SourceConfig(path=str(folder))


def arrow_file(folder: Path, texts: list[str]) -> SourceConfig:
    batches = record_batches(texts)
    import pyarrow as pa

    folder.mkdir()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_file(folder / "x.feather", batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return SourceConfig(path=str(folder))


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def tar_of_txt(folder: Path, texts: list[str]) -> SourceConfig:
    """Two tars with members of other kinds, a folder and names longer than a header holds."""
    folder.mkdir()
    for half in range(2):
        with tarfile.open(folder / f"shard-{half}.tar", "w") as tar:
            for i in range(half * len(texts) // 2, (half + 1) * len(texts) // 2):
                key = f"{'long/' * 30}{i:06d}"
                add(tar, f"{key}.jpg", b"\xff" * i)
                add(tar, f"{key}.txt", texts[i].encode())
                add(tar, f"{key}.json", b'{"text": "not this"}')
                tar.addfile(tarfile.TarInfo(f"{i}/._{i}.txt"))
    return SourceConfig(path=str(folder))


def tar_of_json(folder: Path, texts: list[str]) -> SourceConfig:
    folder.mkdir()
    with tarfile.open(folder / "x.tar.gz", "w:gz") as tar:
        for i, text in enumerate(texts):
            add(tar, f"./{i:06d}.json", json.dumps({"id": i, "text": text}).encode())
    return SourceConfig(path=str(folder))


def write_records(path: Path, records: list[bytes]) -> None:
    name = "array_record.python.array_record_module"
    module = pytest.importorskip(name, reason="needs array_record (jaxtrain[arrayrecord])")
    path.parent.mkdir(exist_ok=True)
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def records_of_text(folder: Path, texts: list[str]) -> SourceConfig:
    write_records(folder / "x.arrayrecord", [t.encode() for t in texts])
    return SourceConfig(path=str(folder))


def records_of_json(folder: Path, texts: list[str]) -> SourceConfig:
    write_records(folder / "x.array_record", [json.dumps({"id": 1, "text": t}).encode() for t in texts])
    return SourceConfig(path=str(folder))


def message(number: int, data: bytes) -> bytes:
    """A protobuf field that holds bytes."""
    length, size = b"", len(data)
    while size >= 128:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([number * 8 + 2]) + length + bytes([size]) + data


def records_of_examples(folder: Path, texts: list[str]) -> SourceConfig:
    def entry(name: str, feature: bytes) -> bytes:
        return message(1, message(1, name.encode()) + message(2, feature))

    numbers = entry("id", message(3, message(1, bytes([150, 1]))))  # an Int64List, packed
    made = [message(1, numbers + entry("text", message(1, message(1, t.encode())))) for t in texts]
    write_records(folder / "x.arrayrecord", made)
    return SourceConfig(path=str(folder))


CUT = [parquet, arrow_stream, arrow_splits, arrow_file]  # at every seventh row
WRITERS: list[Callable[[Path, list[str]], SourceConfig]] = [
    *CUT,
    tar_of_txt,
    tar_of_json,
    records_of_text,
    records_of_json,
    records_of_examples,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
def test_the_same_documents_give_the_same_order(
    tmp_path: Path, write: Callable[[Path, list[str]], SourceConfig]
) -> None:
    sources = (jsonl(tmp_path / "reference", TEXTS), write(tmp_path / "made", TEXTS))
    values = {
        "sequence": 128,
        "global_batch": 4,
        "validation_fraction": 0.0,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 1,
    }
    reference, made = (open_dataset(DataConfig(sources=(s,), **values), seed=3) for s in sources)
    assert made.documents == len(TEXTS)
    assert [made.splits[0].document(i).tolist() for i in range(120)] == [[*t.encode(), 256] for t in TEXTS]
    for step in (0, 1, 7, 1000):
        batch, expected = made.batch(step), reference.batch(step)
        assert all(np.array_equal(batch[k], expected[k]) for k in expected)
    again = open_dataset(DataConfig(sources=(sources[1],), **values), seed=3)
    assert again.fingerprint == made.fingerprint


@pytest.mark.parametrize("write", WRITERS, ids=lambda w: w.__name__)
def test_spans_of_any_size_give_the_same_documents(
    tmp_path: Path, write: Callable[[Path, list[str]], SourceConfig]
) -> None:
    source = write(tmp_path / "made", TEXTS)
    whole = [(d.name, d.text) for d in documents(source)]
    assert [text for _, text in whole] == TEXTS
    assert len({name for name, _ in whole}) == len(TEXTS)
    files = list_files(source)
    for target in (1, 333, 2000, 1 << 30):
        shards = plan_shards(files, target)
        assert [(d.name, d.text) for shard in shards for d in read_shard(shard, "text")] == whole
    if write in CUT:
        assert len(plan_shards(files, 1)) == -(-len(TEXTS) // 7)


def test_folders_of_save_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets (jaxtrain[hf])")
    made = datasets.Dataset.from_dict({"id": list(range(120)), "text": TEXTS})
    made.save_to_disk(tmp_path / "one", num_shards=3)
    chosen = made.filter(lambda row: row["id"] % 2 == 0).shuffle(seed=0)
    datasets.DatasetDict({"train": made, "held": chosen}).save_to_disk(tmp_path / "splits")
    assert [d.text for d in documents(SourceConfig(path=str(tmp_path / "one")))] == TEXTS
    assert [d.text for d in documents(SourceConfig(path=str(tmp_path / "splits")))] == TEXTS
    held = documents(SourceConfig(path=str(tmp_path / "splits" / "held")))
    assert [d.text for d in held] == datasets.load_from_disk(tmp_path / "splits")["held"]["text"]


def test_names_and_rows_of_arrow(tmp_path: Path) -> None:
    source = arrow_splits(tmp_path / "made", TEXTS)
    names = [d.name for d in documents(source)]
    assert names[0] == "train/data-00000-of-00002.arrow:0"
    assert names[-1] == f"train/data-00001-of-00002.arrow:{len(TEXTS) - 9 * 7 - 1}"
    assert len(list(documents(SourceConfig(path=f"{source.path}/test")))) == 3
    (tmp_path / "made" / "dataset_dict.json").write_text('{"splits": ["test", "other"]}')
    assert "no split `train`; give the folder of a split (has test, other)" in error(source.path)


def test_errors_of_arrow(tmp_path: Path) -> None:
    source = arrow_stream(tmp_path / "made", TEXTS)
    assert "no column `body`; set data.sources[].field to one of: id, text" in error(source.path, field="body")
    assert "column `id` holds int64, not text" in error(source.path, field="id")
    path = tmp_path / "made" / "data-00001-of-00002.arrow"
    data = path.read_bytes()
    for cut in (len(data) - 8, len(data) // 2, 3, 0):
        path.write_bytes(data[:cut])
        assert f"{path}: " in error(source.path)
    path.write_bytes(b"nothing of Arrow" + bytes(8))
    assert f"{path}: not a readable Arrow file" in error(source.path)
    path.unlink()
    assert "data-00001-of-00002.arrow is missing, of the 2 data files that state.json names" in error(source.path)
    file = Path(arrow_file(tmp_path / "file", TEXTS).path) / "x.feather"
    file.write_bytes(file.read_bytes()[:-9])
    assert f"{file}: not a readable Arrow file" in error(file)


def test_nulls_of_arrow_are_no_documents(tmp_path: Path) -> None:
    batches = record_batches(["a", None, "", "b"])
    import pyarrow as pa

    with pa.ipc.new_stream(tmp_path / "x.arrow", batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    assert {d.name: d.text for d in documents(SourceConfig(path=str(tmp_path)))} == {"x.arrow:0": "a", "x.arrow:3": "b"}


def test_names_and_members_of_tars(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for i in range(3):
            add(tar, f"a/{i}.seg.txt", b"seg")
            add(tar, f"a/{i}.md", f"md {i}".encode())
            add(tar, f"a/{i}.json", json.dumps({"body": f"body {i}", "n": i}).encode())
        add(tar, "b/9.md", b"last")
        add(tar, "b/9.json", b'{"body": "last body"}')

    def read(field: str) -> dict[str, str]:
        return {d.name: d.text for d in documents(SourceConfig(path=str(tmp_path), field=field))}

    assert read("md") == {"x.tar:a/0": "md 0", "x.tar:a/1": "md 1", "x.tar:a/2": "md 2", "x.tar:b/9": "last"}
    assert list(read("body").values()) == ["body 0", "body 1", "body 2", "last body"]
    assert f"{tmp_path}/x.tar: b/9.json: field `seg.txt` is missing" in error(tmp_path, field="seg.txt")
    assert "a/0.json: field `text` is missing; set data.sources[].field to one of the text fields: body" in error(
        tmp_path
    )
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        add(tar, "a.jpg", b"")
        add(tar, "a.cls", b"\xff")
    assert "a: no member `text`; set data.sources[].field to one of the members: jpg, cls" in error(tmp_path)
    assert "x.tar: a.cls: not UTF-8 (byte 1)" in error(tmp_path, field="cls")


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_tar_is_an_error(tmp_path: Path, packed: bool) -> None:
    source = tar_of_txt(tmp_path / "made", TEXTS[:6])
    path = tmp_path / "made" / "shard-1.tar"
    whole = path.read_bytes().rstrip(b"\0")
    path.unlink()
    (tmp_path / "made" / "shard-0.tar").unlink()
    whole += bytes(-len(whole) % 512)
    path = path.with_name("x.tar.gz" if packed else "x.tar")
    for cut in (*range(512, len(whole) + 1, 512), len(whole) // 2 + 3, 700, 1, 0):
        data = whole[:cut]
        path.write_bytes(gzip.compress(data) if packed else data)
        message = error(source.path)
        assert f"{path}: at " in message
        assert "is it complete?" in message
    path.write_bytes(gzip.compress(whole + bytes(1024))[:-20] if packed else whole + bytes(1024) + whole)
    assert "is it complete?" in error(source.path) if packed else "has data after its end mark" in error(source.path)


def test_a_long_name_that_is_refused_is_not_the_end_of_a_tar(tmp_path: Path, monkeypatch) -> None:
    """As Pythons that check the blocks of a long name refuse one that is cut."""
    source = tar_of_txt(tmp_path / "made", TEXTS[:6])
    assert documents(source)

    def refuse(*_: object) -> None:
        raise tarfile.InvalidHeaderError("invalid header")

    monkeypatch.setattr(tarfile.TarInfo, "_proc_pax", refuse)
    assert "invalid header instead of a member or the end mark" in error(source.path)


def test_errors_of_records(tmp_path: Path) -> None:
    path = tmp_path / "x.arrayrecord"
    write_records(path, [b'{"text": "a"}', b"no JSON"])
    assert f"{path}: record 1: broken JSON" in error(path)
    assert "record 0: field `body` is missing; set data.sources[].field to one of the text fields: text" in error(
        path, field="body"
    )
    write_records(path, [b"text", b"\xff"])
    assert f"{path}: record 1: neither UTF-8 text nor a JSON object nor a tf.train.Example" in error(path)
    records_of_examples(tmp_path, TEXTS)
    assert "record 0: no text feature `body`; set data.sources[].field to one of: text" in error(path, field="body")
    data = path.read_bytes()
    for cut in (len(data) // 2, len(data) - 1, 0):
        path.write_bytes(data[:cut])
        assert f"{path}: not a readable ArrayRecord file" in error(path)


def test_hub_datasets_are_read_from_the_cache_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets (jaxtrain[hf])")
    jsonl(tmp_path / "hub", TEXTS)
    real, asked = datasets.load_dataset, []

    def load_dataset(*names: object, split: str):
        asked.append((*names, split))
        return real(str(tmp_path / "hub"), split="train", cache_dir=str(tmp_path / "library"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [d.text for d in documents(SourceConfig(path="hf://owner/name.x"))] == TEXTS
    assert [d.text for d in documents(SourceConfig(path="hf://owner/name/config:held"))] == TEXTS
    assert asked == [("owner/name.x", None, "train"), ("owner/name", "config", "held")]
    values = {
        "sequence": 128,
        "global_batch": 4,
        "validation_fraction": 0.0,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 1,
    }
    sources = (SourceConfig(path="hf://owner/name"), SourceConfig(path=str(tmp_path / "hub")))
    made, reference = (open_dataset(DataConfig(sources=(s,), **values), seed=3) for s in sources)
    assert np.array_equal(made.batch(5)["tokens"], reference.batch(5)["tokens"])


def test_hub_with_a_fake_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of `datasets` and what becomes of its answer, where it is not installed."""
    folder = Path(arrow_stream(tmp_path / "made", TEXTS).path)
    files = [{"filename": str(folder / f"data-{i:05d}-of-00002.arrow")} for i in (1, 0)]
    library = types.SimpleNamespace(load_dataset=lambda *a, split: types.SimpleNamespace(cache_files=files))
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert [d.text for d in documents(SourceConfig(path="hf://owner/name"))] == TEXTS
    library.load_dataset = lambda *a, split: types.SimpleNamespace(cache_files=[])
    assert "hf://owner/name: holds no rows" in error("hf://owner/name")

    def unreachable(*names: object, split: str):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub\n(and more)")

    library.load_dataset = unreachable
    expected = "hf://owner/name: cannot be loaded (ConnectionError: Couldn't reach 'owner/name' on the Hub)"
    assert error("hf://owner/name") == expected
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert error("hf://owner/name").endswith("needs the package datasets: pip install 'jaxtrain[hf]'")
    assert "is given as hf://OWNER/NAME[/CONFIG][:SPLIT]" in error("hf://owner")
    assert "leave out format and include" in error("hf://owner/name", format="jsonl")
