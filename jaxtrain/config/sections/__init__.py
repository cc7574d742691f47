"""Sections of the config that are long enough for a file of their own."""
