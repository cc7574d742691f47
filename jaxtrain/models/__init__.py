"""Models: the shipped decoder, parameter definitions, FLOP counts."""
