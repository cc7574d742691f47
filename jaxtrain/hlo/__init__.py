"""Readers of compiled programs: collectives, device groups, matmuls, memory traffic."""
