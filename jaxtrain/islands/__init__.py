"""Islands: runs of their own that agree between steps, through a parameter server on Ray actors."""
