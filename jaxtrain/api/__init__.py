"""The public functions and classes, which the commands use, too."""
