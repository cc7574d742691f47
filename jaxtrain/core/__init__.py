"""The compiled train step: pure functions that build state, gradients, update and evaluation, jitted once."""
