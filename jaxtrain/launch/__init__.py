"""Launcher of multi-process runs: starts the workers, watches them, and restarts them when some are lost.

    leader  decides which generation runs and why it ended; no sockets, no processes
    server  the leader's sockets, its lines on the terminal and RUN_DIR/launch.jsonl
    leadership  the leader's process, its saved state and its lease in a store
    agent   one on each node: starts workers, reports their exits, forwards signals
    job     the launched run: its directory, its newest checkpoint, the mesh for a number of processes

A *generation* is the time in which the same workers run. When one of them fails, all are ended, and the next
generation resumes from the newest good checkpoint on the nodes that are left. A *slot* is one worker's place on a node.
"""
