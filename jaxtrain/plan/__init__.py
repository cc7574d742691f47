"""What a step needs before it runs: compiled for a target that need not be there, read, and priced.

`predict.predict` makes a `result.Plan` of a config: `compile` compiles in a process of its own for the devices of
`targets`; `hlo` reads the program; `cost` (with `matmuls`, `traffic`), `communication` and `memory` count;
`chips`, `network`, `timeline`, `bubble` and `calibration` turn them into seconds; `advice` says what would help.
`screen`, `page` (with `plots`) and `diff` show plans, in the words and units of `view`.
"""
