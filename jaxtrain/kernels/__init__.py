"""Kernels: attention, cross-entropy and mixture-of-experts dispatch, each with a plain reference."""
