"""The training loop and everything around it that has side effects."""
