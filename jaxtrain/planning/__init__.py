"""Planning: memory, communication and time of a step, compiled for a target that need not be there.

`predict.predict` makes a `result.Plan` of a config: `compile` compiles in a process of its own for the devices of
`targets`, or for fewer where these are too many (`pods`, `extrapolate`); `assess` makes a plan of it: `hlo` reads the
program; `cost` (with `matmuls`, `traffic`), `communication` and `memory` count; `chips`, `network`, `timeline`,
`bubble` and `calibration` turn them into seconds; `advice` says what would help.
`screen`, `page` (with `plots`) and `diff` show plans, in the words and units of `view`.

`search.search` finds a layout: `space` lists all legal ones, `formula` (with `weights` and `wires`) estimates each
without a compiler, `survey` orders them, `predict` judges the best, `results` keeps their plans, `rivals` says why the
others lost, `found` shows the ranking and writes the winner as a layout file.
"""
