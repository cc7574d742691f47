"""An island of several processes, of which the first one speaks for all."""
