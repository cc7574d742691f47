"""Compression of what replicas exchange."""
