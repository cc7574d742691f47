"""Loss terms, each a (sum, weight) pair that is normalised once over the global batch."""
