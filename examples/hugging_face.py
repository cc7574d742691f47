"""A Hugging Face model continued under FSDP, and pushed back: the folder goes in, a folder comes out.

The model is made here, a small Llama with random weights, so that nothing is downloaded; with a folder of your own:

    python examples/hugging_face.py
    python examples/hugging_face.py --model path/to/Llama-3.2-1B --text my_notes/

Expected for the small one, as transformers measures it: a loss of 5.57 nats a byte before, and 2.23 after 200 steps, in
a minute on two cores. Needs transformers and torch: pip install 'jaxtrain[peer]'.
"""

import argparse
from pathlib import Path

import jaxtrain


def make_model(folder: Path) -> Path:
    """Writes a small Llama with a tokenizer of bytes, as its authors would."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {letter: index + 1 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loss_by_transformers(folder: Path, text: str) -> float:
    """Returns the nats a token that transformers computes for a text, in rows of 128 tokens."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(text)["input_ids"]
    rows = torch.tensor([ids[start : start + 128] for start in range(0, min(len(ids), 12_800) - 127, 128)])
    with torch.no_grad():
        return float(model(rows, labels=rows).loss)


def main() -> None:
    """Continues, exports, and asks transformers."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", type=Path, help="Hugging Face folder; default: a small one made here")
    arguments.add_argument("--text", default="stdlib", help="file, folder or glob; default: Python's standard library")
    arguments.add_argument("--out", type=Path, default=Path("runs"), help="folder for the runs and models")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    given = arguments.parse_args()
    model = given.model or make_model(given.out / "small-llama")
    result = jaxtrain.train(
        name="continued",
        dir=str(given.out),
        simulate=8,
        precision="fp32",
        layout="fsdp",
        model={"from": str(model)},  # architecture, weights and tokenizer
        data={"sources": [given.text], "cache_dir": str(given.out / "cache"), "sequence": 128, "global_batch": 16},
        steps=20 if given.quick else 200,
        optimizer={"name": "adamw", "lr": 3e-3},
        schedule={"name": "cosine", "warmup_steps": 10},
    )
    jaxtrain.export(result.run_dir, given.out / "continued-llama")
    text = Path(argparse.__file__).read_text()
    before, after = (loss_by_transformers(folder, text) for folder in (model, given.out / "continued-llama"))
    print(f"loss by transformers: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
