"""Search for the fastest layout of a model on a target: candidates, costs, ranking."""
