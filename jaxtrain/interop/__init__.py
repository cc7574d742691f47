"""Import and export of Hugging Face models: their config.json, and their weights from and to sharded parameters.

One table per architecture (`tensor_map`) serves both directions, so that a model that is imported and exported again is
bitwise the same. Only `load_weights` and `save_weights` import JAX.
"""
