"""Commands for runs of islands."""
