"""Data: sources, tokenizers, token cache, shuffling, packing, mixtures and prefetching, in NumPy without JAX."""

from jaxtrain.data.dataset import Dataset, TextDataset, open_dataset, open_datasets, open_validation_sets
from jaxtrain.data.prefetch import Prefetcher
from jaxtrain.data.prepare import BuildResult, TokenizerResult, build_caches, text_sources, train_tokenizer
from jaxtrain.data.token_cache.build import build_cache
from jaxtrain.data.token_cache.store import TokenCache, open_cache
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError

__all__ = [
    "BuildResult", "DataError", "Dataset", "Prefetcher", "TextDataset", "TokenCache", "Tokenizer", "TokenizerResult",
    "build_cache", "build_caches", "load_tokenizer", "open_cache", "open_dataset", "open_datasets",
    "open_validation_sets", "text_sources", "train_tokenizer",
]  # fmt: skip
