"""Proof that no layout changes the result of a config: losses, gradients and updates against one device."""
