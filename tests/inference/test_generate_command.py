"""`jaxtrain generate` from a Hugging Face folder: several prompts, on eight devices, with the tokenizer's BOS."""

from __future__ import annotations

import json
from pathlib import Path

import hf_models
import numpy as np
import pytest

from jaxtrain.cli.main import main
from jaxtrain.data.tokenizer import EOS, ByteTokenizer, load_tokenizer, train_bpe
from jaxtrain.inference.model import _text

TEXT = "the quick brown fox runs over the lazy dog and then it sleeps on a red mat in the house "
PROMPTS = ["the cat", "a", "dogs and cats run over the house", "why not"]
GREEDY = [
    "--tokens",
    "8",
    "--temperature",
    "0",
    "--simulate",
    "8",
    "precision=fp32",
]


def with_bos(source: Path, target: Path, post_processor: bool, asked: bool) -> Path:
    """A copy of a tokenizer that has `<s>`, and puts it before texts by its own rules or by those beside it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (jaxtrain[data])")
    made = tokenizers.Tokenizer.from_file(str(source))
    made.add_special_tokens(["<s>"])
    if post_processor:
        rules = {"single": "<s> $A", "special_tokens": [("<s>", made.token_to_id("<s>"))]}
        made.post_processor = tokenizers.processors.TemplateProcessing(**rules)
    target.mkdir()
    made.save(str(target / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "bos_token": "<s>"}
    described |= {"add_bos_token": True} if asked else {}
    (target / "tokenizer_config.json").write_text(json.dumps(described))
    return target / "tokenizer.json"


@pytest.mark.parametrize(("post_processor", "asked"), [(False, False), (True, False), (False, True)])
def test_the_token_before_a_text_is_found(tmp_path: Path, post_processor: bool, asked: bool):
    source = train_bpe(iter([TEXT]), 270, tmp_path / "source")
    tokenizer = load_tokenizer(str(with_bos(source, tmp_path / "made", post_processor, asked)))
    assert (tokenizer.bos is not None) == (post_processor or asked)
    if tokenizer.bos is not None:
        assert tokenizer.bos == tokenizer.vocab - 1
        assert tokenizer.bos not in tokenizer.encode_batch([TEXT])[0]  # documents of training get none


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A random model whose tokenizer adds a BOS, and what transformers goes on with after each prompt alone."""
    transformers = pytest.importorskip("transformers", reason="needs transformers, the peer (jaxtrain[peer])")
    torch = pytest.importorskip("torch", reason="needs torch, the peer (jaxtrain[peer])")
    folder = tmp_path_factory.mktemp("generate")
    file = with_bos(train_bpe(iter([TEXT * 3]), 299, folder / "source"), folder / "hf", True, False)
    tokenizer = load_tokenizer(str(file))
    name, options = hf_models.CASES["llama2"]
    options = {**options, "vocab_size": tokenizer.vocab, "bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hf_models.CASES, "here", (name, options))
        peer = hf_models.make("here", folder / "hf")
    reader = transformers.AutoTokenizer.from_pretrained(folder / "hf")
    texts = []
    for prompt in PROMPTS:
        ids = reader(prompt).input_ids
        assert ids[0] == tokenizer.bos
        said = peer.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos)[0]
        texts.append(tokenizer.decode(said.tolist()))
    return folder / "hf", texts


def test_prompts_together_and_alone_are_those_of_transformers(
    model: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture
):
    folder, expected = model
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS[1:]) + "\n\n")
    several = ["--prompt", PROMPTS[0], "--prompts", str(file), "layout=fsdp_tp", "mesh.model=2"]
    assert main(["generate", str(folder), *several, *GREEDY]) == 0
    assert capsys.readouterr().out == "\n\n".join(expected) + "\n"
    assert main(["generate", str(folder), "--prompt", PROMPTS[2], "layout=fsdp", *GREEDY]) == 0
    assert capsys.readouterr().out == expected[2] + "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no prompt; expected --prompt TEXT or --prompts FILE"),
        (["--prompt", ""], "a prompt is empty"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (["--prompt", "x"], "no tokenizer.json"),
        (["--prompt", "x", "--step", "3"], "has no checkpoints"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture, arguments: list[str], said: str):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 300, **sizes}))
    assert main(["generate", str(tmp_path), *arguments]) != 0
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_characters_of_several_bytes_are_never_cut():
    ids = list("aß漢🙂é".encode())
    pieces = list(_text(ByteTokenizer(), [97], iter(ids)))
    assert "".join(pieces) == "aß漢🙂é"
    assert [piece for piece in pieces if piece] == list("aß漢🙂é")
    assert np.all(["\ufffd" not in piece for piece in pieces])
