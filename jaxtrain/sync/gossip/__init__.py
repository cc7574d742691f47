"""Gossip: replicas that average with some others, over a graph."""
