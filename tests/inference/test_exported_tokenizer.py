"""Tokenizer, special tokens and ends of texts of an exported run, as transformers and `jaxtrain generate` read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxtrain.cli.main import main
from jaxtrain.data.tokenizer import EOS, load_tokenizer, train_bpe
from jaxtrain.data.tokenizer_files import AUXILIARY_FILES

pytestmark = pytest.mark.xdist_group("exported_tokenizer")  # one trained run for each tokenizer
DOCUMENT = "the cat sleeps on a mat.\n"
PROMPTS = ["the cat", "the", f"the cat{EOS}the", f"{EOS}the cat sleeps", '!"#é漢 \x00\x7f']
SMALL = [
    "simulate=8", "layout=ddp", "precision=fp32", "steps=120", "model.embed=32", "model.layers=1", "model.heads=2",
    "model.kv_heads=1", "model.mlp=64", "data.sequence=64", "data.global_batch=8", "optimizer.lr=1e-2",
    "schedule.warmup_steps=5", "data.validation_fraction=0", "data.sources.0.format=jsonl", "log.sample_tokens=0",
    "mesh.data=8", "mesh.fsdp=1", "mesh.model=1",
]  # fmt: skip


@pytest.fixture(scope="module", params=["bytes", "mine.json"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run that has learned one document, its export, and its tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.jsonl").write_text(200 * (json.dumps({"text": DOCUMENT}) + "\n"))
    tokenizer = request.param
    if tokenizer != "bytes":
        pytest.importorskip("tokenizers", reason="needs tokenizers (jaxtrain[data])")
        made = train_bpe(iter([DOCUMENT * 3]), 275, folder / "made")
        tokenizer = str(made.rename(folder / tokenizer))
    own = [f"data.sources.0.path={folder}/text.jsonl", f"data.cache_dir={folder}/cache", f"data.tokenizer={tokenizer}"]
    assert main(["train", "configs/quickstart.yaml", *SMALL, *own, f"dir={folder}", "name=run"]) == 0
    assert main(["export", str(folder / "run"), "--to", str(folder / "hf")]) == 0
    return folder / "run", folder / "hf", tokenizer


def generated(model: Path, prompt: str, tokens: int, capsys: pytest.CaptureFixture) -> str:
    capsys.readouterr()
    assert main(["generate", str(model), "--prompt", prompt, "--tokens", str(tokens), "--temperature", "0"]) == 0
    return capsys.readouterr().out.removesuffix("\n")


def test_the_files_hold_the_tokenizer_and_its_special_tokens(run: tuple[Path, Path, str]):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (jaxtrain[data])")
    _, hf, source = run
    ours, theirs = load_tokenizer(source), tokenizers.Tokenizer.from_file(str(hf / "tokenizer.json"))
    for text in [*PROMPTS, DOCUMENT, *map(chr, range(1, 0x250))]:
        assert theirs.encode(text).ids == ours.encode_prompt(text)
        assert theirs.decode(ours.encode_prompt(text)) == ours.decode(ours.encode_prompt(text))
    assert theirs.token_to_id(EOS) == ours.eos
    content, settings = (json.loads((hf / name).read_text()) for name in ("config.json", "generation_config.json"))
    assert (content["bos_token_id"], content["eos_token_id"]) == (None, ours.eos)
    assert (settings["bos_token_id"], settings["eos_token_id"]) == (None, ours.eos)
    assert settings["suppress_tokens"] == list(range(ours.vocab, content["vocab_size"]))
    assert json.loads((hf / "special_tokens_map.json").read_text())["eos_token"] == EOS


def test_a_text_ends_where_the_documents_of_training_did(run: tuple[Path, Path, str], capsys: pytest.CaptureFixture):
    for model in run[:2]:
        assert generated(model, "the cat", 60, capsys) == DOCUMENT
        assert generated(model, "the", 60, capsys) == DOCUMENT


def test_transformers_reads_the_same_ids_and_stops_at_the_same_place(
    run: tuple[Path, Path, str], capsys: pytest.CaptureFixture
):
    transformers = pytest.importorskip("transformers", reason="needs transformers, the peer (jaxtrain[peer])")
    pytest.importorskip("torch", reason="needs torch, the peer (jaxtrain[peer])")
    _, hf, source = run
    ours, theirs = load_tokenizer(source), transformers.AutoTokenizer.from_pretrained(hf)
    assert (theirs.eos_token_id, theirs.bos_token_id, len(theirs)) == (ours.eos, None, ours.vocab)
    for text in PROMPTS:
        assert theirs(text).input_ids == ours.encode_prompt(text)
    pipeline = transformers.pipeline("text-generation", str(hf), tokenizer=theirs)
    for prompt in PROMPTS[:4]:
        (said,) = pipeline(prompt, max_new_tokens=60, do_sample=False, skip_special_tokens=False)
        assert said["generated_text"].removesuffix(EOS) == generated(hf, prompt, 60, capsys)
    assert [said[0]["generated_text"] for said in pipeline(["the", "the cat"], batch_size=2)] == [DOCUMENT, DOCUMENT]


def test_an_import_keeps_the_files_and_the_next_export_has_them(run: tuple[Path, Path, str], tmp_path: Path):
    _, hf, _ = run
    assert main(["import", str(hf), "--to", str(tmp_path / "back"), "simulate=8"]) == 0
    (tmp_path / "back").rename(tmp_path / "moved")  # the config holds the path of its tokenizer
    assert main(["export", str(tmp_path / "moved"), "--to", str(tmp_path / "again")]) == 0
    for name in ("config.json", *AUXILIARY_FILES):
        files = [folder / name for folder in (hf, tmp_path / "again")]
        assert files[0].is_file() == files[1].is_file()
        if files[0].is_file():
            assert files[0].read_text() == files[1].read_text(), name


def test_the_files_of_a_tuned_model_are_kept_and_all_its_ends_stop(tmp_path: Path):
    """A chat model ends a turn with another token than a document; both end a generated text."""
    pytest.importorskip("tokenizers", reason="needs tokenizers (jaxtrain[data])")
    from jaxtrain.data.tokenizer_files import token_ids, write_tokenizer

    file = train_bpe(iter([DOCUMENT]), 270, tmp_path / "source")
    (file.parent / "generation_config.json").write_text('{"eos_token_id": [5, 0], "temperature": 0.6}')
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    tokenizer = load_tokenizer(str(file))
    assert tokenizer.stops == {0, 5}
    assert token_ids(tokenizer) == {"bos_token_id": None, "eos_token_id": [0, 5]}
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", tokenizer, str(file), 384)
    assert json.loads((tmp_path / "out/generation_config.json").read_text()) == {
        "eos_token_id": [5, 0],
        "temperature": 0.6,
    }
    described = json.loads((tmp_path / "out/tokenizer_config.json").read_text())
    assert (described["chat_template"], described["eos_token"]) == ("{{ messages }}", EOS)


def test_a_tuned_model_also_stops_at_the_end_of_its_documents(tmp_path: Path):
    """Its documents end with a token that the settings of the model it came from do not name."""
    pytest.importorskip("tokenizers", reason="needs tokenizers (jaxtrain[data])")
    from jaxtrain.data.tokenizer_files import write_tokenizer

    file = train_bpe(iter([DOCUMENT]), 270, tmp_path / "source")
    (file.parent / "generation_config.json").write_text('{"eos_token_id": 5, "top_p": 0.9}')
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", load_tokenizer(str(file)), str(file), 384)
    settings = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert settings == {"eos_token_id": [0, 5], "top_p": 0.9}
