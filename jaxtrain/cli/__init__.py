"""The `jaxtrain` command: a parser and one function for each subcommand. JAX is imported when a command runs."""
