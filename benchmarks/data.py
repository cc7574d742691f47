"""Speed of packed batches: warm and cold token cache, first batch, permutation, tokenizers, waste.

    python benchmarks/data.py [--out data.json] [--tokens 300e6] [--sequence 4096] [--batch 64] [--dir FOLDER]
                              [--quick]

A synthetic corpus (log-normal documents of 1400 tokens in the mean, fixed seed) is written as a token cache, then read
by this process only, pinned to one core. Goals: 50 million packed tokens/s warm, 30 cold.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data.dataset import TextDataset
from jaxtrain.data.order import permute
from jaxtrain.data.token_cache.build import build_cache
from jaxtrain.data.token_cache.store import ShardWriter, finish_cache, open_cache
from jaxtrain.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

VOCAB, MEAN, SIGMA, SHARDS = 32_000, 1400, 1.2, 8
GOALS = {"packed tokens/s, warm": 50e6, "packed tokens/s, cold": 30e6}


class SyntheticTokenizer(ByteTokenizer):
    """Tokenizer of which only the sizes are used: the corpus consists of token ids."""

    name, vocab, eos, fingerprint = "synthetic", VOCAB, 0, "synthetic"


def write_corpus(folder: Path, tokens: int) -> None:
    """Writes a token cache of about `tokens` tokens; equal sizes give equal caches."""
    rng = np.random.default_rng(0)
    documents = math.ceil(tokens / MEAN / SHARDS)
    for shard in range(SHARDS):
        lengths = np.maximum(rng.lognormal(math.log(MEAN) - SIGMA**2 / 2, SIGMA, documents), 1).astype(np.int64)
        ids = rng.integers(1, VOCAB, int(lengths.sum()), np.uint16)
        writer = ShardWriter(folder, shard, VOCAB, 0)
        writer.add("train", np.split(ids, np.cumsum(lengths)[:-1]), 0)
        writer.close("synthetic")
    finish_cache(folder, "synthetic", SHARDS, SyntheticTokenizer())


def evict(folder: Path) -> bool:
    """Drops a folder's files from the page cache; returns False if the system can not."""
    if not hasattr(os, "posix_fadvise"):
        return False
    gc.collect()  # pages that are still mapped would stay
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return True


def dataset(folder: Path, args: argparse.Namespace) -> TextDataset:
    data = DataConfig(sources=(SourceConfig(path="synthetic"),), sequence=args.sequence, global_batch=args.batch)
    return TextDataset(data, 0, "train", [open_cache(folder)], SyntheticTokenizer())


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def rate(data: TextDataset, first: int, seconds: float) -> float:
    """Packed tokens per second of consecutive batches from step `first`."""
    begin, step = time.perf_counter(), first
    while time.perf_counter() - begin < seconds:
        data.batch(step)
        step += 1
    return (step - first) * data.global_batch * data.sequence / (time.perf_counter() - begin)


def reading(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    out: dict[str, float] = {}
    seconds = 0.1 if args.quick else 2.0
    cold, first = [], {0: [], 1_000_000: []}
    for repeat in range(3):
        if evict(folder):
            cold.append(rate(dataset(folder, args), repeat * 10_000, seconds))
        for step in first:
            data = dataset(folder, args)
            first[step].append(timed(lambda d=data, s=step: d.batch(s)))
        data = None  # unmapped, so that it can be evicted
    for split in open_cache(folder).train, open_cache(folder).validation:
        split.verify()  # reads it all: warm from here on
    data = dataset(folder, args)
    out["packed tokens/s, warm"] = max(rate(data, repeat * 1000, seconds) for repeat in range(3))
    if cold:
        out["packed tokens/s, cold"] = max(cold)
    for step, times in first.items():
        out[f"first batch, step {step:,}, ms"] = min(times) * 1e3
    packer = data._packers[0]
    if packer is not None:
        every = packer.pieces(np.arange(packer.rows))
        out["waste, %"] = 100 * (1 - int(every.length.sum()) / (packer.rows * args.sequence))
        cut = np.bincount(every.document, minlength=packer.documents)
        out["documents cut, %"] = 100 * float(np.mean(cut > 1))
        out["documents longer than a row, %"] = 100 * float(np.mean(packer.lengths > args.sequence))
        out["packing, ms per block"] = 1e3 * min(timed(lambda b=b: packer._pack_block(0, b)) for b in range(3))
    return out


def permutation(quick: bool) -> dict[str, float]:
    index = np.arange(10_000 if quick else 1_000_000)
    sizes = {"1e6": 10**6, "1e9": 10**9}
    return {
        f"permutation of {k}, ns/index": min(timed(lambda n=n: permute(index, n, 0, 0)) for _ in range(3))
        / len(index)
        * 1e9
        for k, n in sizes.items()
    }


def tokenizing(folder: Path, quick: bool) -> dict[str, float]:
    """Tokenizer speed on the standard library's source text; the BPE is trained on a part of it."""
    from jaxtrain.data.sources import documents

    texts = [d.text for d in documents(SourceConfig())][:: 400 if quick else 8]
    out = {}
    path = train_bpe(iter(texts[::4]), 512 if quick else 8192, folder)
    encoders: dict[str, Tokenizer] = {"bytes": load_tokenizer("bytes"), "BPE of 8192": load_tokenizer(str(path))}
    for name, encoder in encoders.items():
        begin = time.perf_counter()
        tokens = sum(len(e) for e in encoder.encode_batch(texts))
        seconds = time.perf_counter() - begin
        out[f"{name}, tokens/s"] = tokens / seconds
        out[f"{name}, bytes/s"] = sum(len(t.encode()) for t in texts) / seconds
    out["cache build of the standard library, bytes, s"] = timed(
        lambda: build_cache(SourceConfig(), "bytes", 0.01, folder, 1)
    )
    out["the same again, s"] = timed(lambda: build_cache(SourceConfig(), "bytes", 0.01, folder, 1))
    return out


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=float, default=300e6, help="size of the corpus")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dir", help="folder for the corpus, on the disk to be measured; default: a temporary one")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.sequence, args.batch = 20e6, 256, 8
    host = common.machine("tokenizers")
    if hasattr(os, "sched_setaffinity"):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    folder = Path(tempfile.mkdtemp(prefix="jaxtrain-data-", dir=args.dir))
    try:
        corpus = folder / "corpus"
        corpus.mkdir()
        write_corpus(corpus, int(args.tokens))
        figures = {**reading(corpus, args), **permutation(args.quick), **tokenizing(folder, args.quick)}
    finally:
        shutil.rmtree(folder)
    shape = f"{args.batch} rows of {args.sequence}, corpus of {args.tokens:,.0f} tokens"
    print(f"{common.title(host)}; one core used; {shape}")
    for name, value in figures.items():
        goal = f"   goal {GOALS[name]:,.0f}: {'met' if value >= GOALS[name] else 'MISSED'}" if name in GOALS else ""
        print(f"  {name:<48}{value:>16,.{0 if value > 1e4 else 4}f}{goal}")
    common.report("data", args, figures, host)


if __name__ == "__main__":
    main()
