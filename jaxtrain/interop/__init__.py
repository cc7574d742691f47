"""Weights of Hugging Face models, straight into shards and out of them again.

One table per architecture (`tensors`) is read in both directions, so that a model which is imported and exported again
is bitwise the same. Its config.json is read in `jaxtrain.interop.config_json`. Only `load` and `save` import JAX.
"""
