"""Commands of `jaxtrain`: one module each, whose `run(args)` returns the exit code."""
