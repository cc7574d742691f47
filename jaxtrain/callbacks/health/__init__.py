"""Callbacks that watch the health of a run: hangs, bad steps, silent corruption, stragglers, its folder."""
