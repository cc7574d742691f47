"""Processes of a run: the JAX runtime, the key-value store they share, and how they agree."""
