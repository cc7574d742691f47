"""Runs torch's PowerSGD hook, in float64, on given gradients of one of two processes: RANK FOLDER.

See test_torch_power_sgd.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
given = np.load(folder / "given.npz")
names, steps = list(given["names"]), int(given["steps"])
state = powerSGD_hook.PowerSGDState(
    None, matrix_approximation_rank=int(given["rank"]), start_powerSGD_iter=2, min_compression_rate=1
)
state.iter = state.start_powerSGD_iter
means = {}
for step in range(steps):
    tensors = [torch.from_numpy(given[f"{name}/{step}"][rank].astype(np.float64)) for name in names]
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    bucket = SimpleNamespace(
        buffer=lambda flat=flat: flat, index=lambda: 0, gradients=lambda views=views: views, is_last=lambda: True
    )
    if step == 0:  # Q of the first step, in place of a random one
        q = torch.from_numpy(given["q"].astype(np.float64))
        state.q_memory_dict[0], state.p_memory_dict[0] = q, torch.empty(int(given["p_size"]), dtype=torch.float64)
    powerSGD_hook.powerSGD_hook(state, bucket).wait()
    means |= {f"{name}/{step}": view.numpy().copy() for name, view in zip(names, views, strict=True)}
errors = state.error_dict[0].numpy()
np.savez(folder / f"found-{rank}.npz", errors=errors, **means)
dist.destroy_process_group()
