"""The `jaxtrain` command: arguments, and one module for each subcommand, which imports JAX when it runs."""
