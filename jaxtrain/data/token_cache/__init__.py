"""Token cache: documents tokenized once, in memory-mapped shards on disk."""
