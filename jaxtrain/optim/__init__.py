"""Optimizers, learning-rate schedules and the sharding of optimizer state."""
