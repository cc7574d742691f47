"""Gossip of islands: each mixes its parameters with those of a few others, and waits for nobody else."""
