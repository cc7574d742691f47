"""Planning: memory, communication and time of a step on hardware that need not be present, and layout search.

`predict.predict` makes a `result.Plan` of a config. `compile` compiles the step in a child process for the devices of
`hardware.targets`, or for smaller `pods` of a very large cluster. `assess` turns the program into a plan: `hlo` reads
it; `cost.roofline`, `cost.transfers` and `cost.memory` count and price it with the figures of `hardware`; `advice`
suggests changes. `report` shows plans on a terminal, as HTML, and as differences.

`search.search` searches layouts: `choices` lists all legal ones, `cost.estimate` estimates each without compiling,
`search.candidates` orders them, `predict` compiles the best, and `search.ranking` shows the result.
"""
