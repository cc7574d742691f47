"""Runs torch's PostLocalSGDOptimizer as one of two processes: RANK FOLDER; see test_peers.py."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
given = np.load(folder / "given.npz")
first, every = int(given["bsp_steps"]), int(given["every"])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.from_numpy(given[name].copy())) for name in ("a", "b"))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((torch.tanh(x @ self.a) @ self.b - y) ** 2).sum() / len(x)


net = Net()
parallel = torch.nn.parallel.DistributedDataParallel(net)
alone, _ = dist.new_subgroups(1)
parallel.register_comm_hook(PostLocalSGDState(None, alone, start_localSGD_iter=first), post_localSGD_hook)
# torch averages at the first step that is not warm-up, and then every `period` steps.
averager = PeriodicModelAverager(period=every, warmup_steps=first + every - 1)
optimizer = PostLocalSGDOptimizer(torch.optim.SGD(net.parameters(), lr=float(given["lr"])), averager)
history = []
for x, y in zip(given["x"], given["y"], strict=True):
    half = slice(rank * len(x) // 2, (rank + 1) * len(x) // 2)
    optimizer.zero_grad()
    parallel(torch.from_numpy(x[half]), torch.from_numpy(y[half])).backward()
    optimizer.step()
    history.append([parameter.detach().numpy().copy() for parameter in (net.a, net.b)])
np.savez(folder / f"found-{rank}.npz", a=[one[0] for one in history], b=[one[1] for one in history])
dist.destroy_process_group()
