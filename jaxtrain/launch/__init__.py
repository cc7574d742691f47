"""Real processes: starts the workers of a run, watches them, and goes on when some are lost. No JAX.

    leader  pure decisions: who is there, which generation runs, why it ended, what comes next
    server  the leader's sockets, terminal lines and RUN_DIR/launch.jsonl; on node 0
    agent   one on each node: starts workers, reports their ends, passes signals on
    job     the run: its folder, its newest checkpoint, the mesh that fits so many processes

A *generation* is the time in which the same workers run. Whatever ends it, all of them end, and the next generation
resumes from the newest good checkpoint with whatever is there. A *slot* is a place for one worker on a node.
"""
