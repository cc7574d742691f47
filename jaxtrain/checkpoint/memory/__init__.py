"""In-memory checkpoints: the newest states in the memory of two nodes each, so that losing a node loses one step.

    checkpointer  worker: copies its shards after a step, and restores the newest complete step
    client        worker: connection to the server of a node
    server        agent: holds the snapshots of its node and its neighbour
    protocol      messages between them, and the format of a snapshot

A snapshot is what one process holds of the state at one step.
"""
