"""Readers of compiled programs: collectives, device groups, matmuls and memory traffic."""
