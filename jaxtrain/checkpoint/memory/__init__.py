"""State between checkpoints in the memory of the nodes: each shard on two of them, so that losing one loses a step.

part.py    what one process has of a step: a header and bytes
stock.py   the parts that a node's agent holds, and its server
wire.py    their messages
client.py  how workers reach the agents
keeper.py  a worker's side: copies its shards after a step, and puts the newest whole step together again
"""
