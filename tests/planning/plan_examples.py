"""Plans as `predict` gives them, with round figures."""

from __future__ import annotations

from typing import Any

from jaxtrain.planning.result import Advice, Plan, Traffic

AXES = dict.fromkeys(("replica", "pipeline", "data", "fsdp", "expert", "context", "model"), 1)
FITTING: dict[str, Any] = {
    "target": "h100:2x8", "device": "NVIDIA H100 80GB HBM3", "devices": 16, "layout": "fsdp_tp: fsdp 2 x model 8",
    "sizes": AXES | {"fsdp": 2, "model": 8}, "fits": True, "needs": 40_000_000_000, "usable": 78_996_970_536,
    "crosses": {"fsdp": True, "model": False},
    "memory": {
        "params": 2_000_000_000, "gradients": 4_000_000_000, "optimizer": 8_000_000_000, "gathered": 1_000_000_000,
        "activations": 24_000_000_000, "batch": 1_000_000_000, "host": 5_000_000_000,
    },
    "tensors": (("opt_state/mu/layers/mlp/down", 1_500_000_000), ("params/embed/table", 250_000_000)),
    "buffers": (("bf16[32,16,512,4096]", "jvp(cross_entropy)/dot_general", 2_147_000_000), ("f32[8,8]", "", 256)),
    "traffic": (
        Traffic("model", "all-gather", "NVLink", 194, 90_000_000_000, 0.25, 0.05),
        Traffic("fsdp", "reduce-scatter", "InfiniBand", 40, 2_000_000_000, 0.04, 0.04),
    ),
    "flops_model": 3e14, "flops_hardware": 4e14, "flops_compiled": 4.01e14,
    "compute_seconds": 0.7, "exposed_seconds": 0.2, "bubble_seconds": 0.1,
    "seconds_by": {
        "phase": {"backward": 0.4, "forward": 0.2, "remat": 0.1},
        "part": {"layers": 0.6, "loss": 0.1},
        "kind": {"matmul": 0.5, "elementwise": 0.2},
    },
    "step_seconds": 1.0, "mfu": 0.3, "hfu": 0.4, "tokens": 500_000, "steps": 172_800,
    "bottleneck": "matrix multiplications: 50% of the step",
    "advice": (Advice("step.remat=none", 0.16, "39 GB are left"), Advice("mesh.model=4", 0.04, "less is sent")),
    "notes": ("a loop of unknown length counts once",), "compile_seconds": 12.3,
}  # fmt: skip


def fitting(**changes: Any) -> Plan:
    """A step that fits, of which everything is known."""
    return Plan(**FITTING | changes)


def simulated() -> Plan:
    """A step on CPU devices: no capacity, no network, no step time."""
    rows = tuple(Traffic(row.axes, row.op, "host", row.count, row.bytes, None, None) for row in FITTING["traffic"])
    unknown = dict.fromkeys(("usable", "fits", "exposed_seconds", "step_seconds", "mfu", "hfu"))
    host = {"target": "simulate:16", "device": "cpu", "advice": (), "bottleneck": "the step time is unknown"}
    return fitting(**unknown, **host, traffic=rows)


def refused() -> Plan:
    """A step that the compiler refuses for its memory."""
    return Plan(
        "v5e:2x4", "v5e", 8, "fsdp: fsdp 8", AXES | {"fsdp": 8}, fits=False, reason="Ran out of memory on HBM",
        needs=129_000_000_000, usable=16_911_433_728, tokens=500_000, steps=100,
    )  # fmt: skip


def crashed() -> Plan:
    """A step that the compiler broke down on."""
    return Plan(
        "h100:1x8", "h100", 8, "fsdp: fsdp 8", AXES | {"fsdp": 8}, fits=None, compiled=False,
        reason="compiling ended with status -11", usable=78_996_970_536, tokens=500_000, steps=100,
    )  # fmt: skip
