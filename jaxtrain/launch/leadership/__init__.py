"""Leadership of a launched job: the leader's process, its saved state, its lease in a store, and the way to it.

process   starts the leader beside an agent, and again when it ends
lead      runs in that process: campaigns if there is a store, restores the state, serves the agents
state     what a leader saves, so that another one can adopt the generation that runs
link      connection of an agent to whoever leads
"""
