"""Files, HTML and SVG, threads and processes: helpers that need neither JAX nor the config."""
