"""Chips, networks and targets, and what programs achieve of their figures."""
