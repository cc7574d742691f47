"""Commands for the first hour: a config and a model to begin with, layouts, a look at the machine, completion."""
