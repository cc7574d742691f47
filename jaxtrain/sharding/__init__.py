"""Layouts: mesh axes, sharding rules, their checks, and the constraints they put on arrays."""
