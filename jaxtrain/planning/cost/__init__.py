"""Cost model of a step: memory, communication, matmuls, overlap, pipeline bubble."""
