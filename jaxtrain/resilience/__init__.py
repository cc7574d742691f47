"""What keeps a run going: hangs are ended. No JAX."""
