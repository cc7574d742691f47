"""Data in a training run: given objects, reading ahead, the place in an iterable."""
