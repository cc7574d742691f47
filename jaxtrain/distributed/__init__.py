"""Multi-process runtime: starting JAX, the coordination store, and agreement between processes."""
