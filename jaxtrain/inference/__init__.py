"""Generation and scoring with the checkpoints of a run."""
