"""Files, subprocesses, HTML and SVG: what needs neither JAX nor the config."""
