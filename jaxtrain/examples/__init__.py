"""Models and data of the kind that users write themselves."""
