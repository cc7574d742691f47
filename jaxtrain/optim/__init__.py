"""Optimizers, schedules and the placement of their state."""
