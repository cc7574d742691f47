"""Token cache: documents tokenized once, in shards on disk."""
