"""Callbacks of a training run: objects that watch it, or act on it between steps."""
