"""Data that is given as Python objects: batches by step, rows, iterables of batches."""
