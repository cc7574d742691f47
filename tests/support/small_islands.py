"""Config of a small run, for the launched islands of several folders of tests."""

CONFIG = """
name: run
dir: {dir}
steps: 24
simulate: 2
layout: fsdp
mesh: {{fsdp: 2, data: 1}}
precision: fp32
model: {{embed: 32, layers: 2, mlp: 64, heads: 2}}
data: {{sources: [{{path: {text}}}], sequence: 32, global_batch: 8, validation_fraction: 0, cache_dir: {dir}/cache}}
optimizer: {{lr: 3.0e-3}}
eval: {{every: null}}
checkpoint: {{every: 12}}
log: {{tensorboard: false, sample_tokens: 0}}
"""
