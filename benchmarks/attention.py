"""Memory and time of the attention kernels that run on this machine, forward and backward.

    python benchmarks/attention.py [--batch 2] [--time 1024] [--heads 8] [--kv-heads 2] [--head-dim 64]
                                   [--window N] [--documents N] [--dtype bfloat16] [--kernels reference xla cudnn]
                                   [--repeats 5] [--quick] [--out attention.json]

Kernels that do not support the options are skipped with the reason. `temporaries` is the memory of the compiled program
without arguments and results; time is the median of interleaved runs; TFLOP/s counts visible pairs only (half of them
when causal), 4 x head_dim forward and 10 x head_dim backward each.
"""

from __future__ import annotations

import argparse
from functools import partial

import common
import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.kernels.attention import KERNELS, attention


def segments(args: argparse.Namespace) -> np.ndarray | None:
    """Returns the ids of equally long documents, [batch, time]."""
    if not args.documents:
        return None
    ids = np.arange(args.time) * args.documents // args.time + 1
    return np.tile(ids.astype(np.int32), (args.batch, 1))


def pairs(args: argparse.Namespace, ids: np.ndarray | None) -> int:
    """Returns the number of visible query-key pairs."""
    q, k = np.arange(args.time)[:, None], np.arange(args.time)[None]
    visible = (q >= k) & (q - k < (args.window or args.time))
    if ids is not None:
        visible &= ids[0][:, None] == ids[0][None]
    return args.batch * int(visible.sum())


def forward_backward(run, q, k, v, g):
    """Returns output and gradients."""
    out, pullback = jax.vjp(run, q, k, v)
    return out, pullback(g)


def programs(args: argparse.Namespace, arrays: tuple, ids: np.ndarray | None) -> dict[str, jax.stages.Compiled]:
    """Compiles output and gradients by kernel; prints why a kernel is skipped."""
    compiled = {}
    for kernel in args.kernels:
        options = {"segments_BT": None if ids is None else jnp.asarray(ids), "window": args.window, "kernel": kernel}
        try:
            compiled[kernel] = (
                jax.jit(partial(forward_backward, partial(attention, **options))).lower(*arrays).compile()
            )
        except ValueError as error:
            print(f"{kernel:12} skipped: {error}")
    return compiled


def main() -> None:
    """Prints the table and writes the JSON."""
    on_cpu = jax.default_backend() == "cpu"
    kernels = [k for k in KERNELS if k != "splash" or not on_cpu]  # interpreted on CPU: too slow to compare
    parser = common.parser(__doc__)
    for name, default in (("batch", 2), ("time", 1024), ("heads", 8), ("kv-heads", 2), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", type=int)
    parser.add_argument("--documents", type=int, default=0, help="documents per row; 0 without segments")
    parser.add_argument("--dtype", default="float32" if on_cpu else "bfloat16")
    parser.add_argument("--kernels", nargs="+", default=kernels, choices=KERNELS)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.time, args.heads, args.repeats = 128, 2, 1

    where = common.machine()
    print(common.title(where))
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (args.heads, args.kv_heads, args.kv_heads, args.heads)
    arrays = tuple(
        jax.random.normal(key, (args.batch, args.time, n, args.head_dim), args.dtype) for key, n in zip(keys, heads)
    )
    ids = segments(args)
    flops = pairs(args, ids) * args.heads * args.head_dim * 14
    compiled = programs(args, arrays, ids)
    seconds = common.medians(compiled, arrays, args.repeats)
    print(f"{'kernel':12}{'temporaries MiB':>18}{'ms':>10}{'TFLOP/s':>10}")
    results = []
    for name, program in compiled.items():
        time = seconds[name]
        temporaries = program.memory_analysis().temp_size_in_bytes
        results.append({"kernel": name, "temporaries": temporaries, "seconds": time, "flops": flops})
        print(f"{name:12}{temporaries / 2**20:18.1f}{time * 1e3:10.1f}{flops / time / 1e12:10.3f}")
    common.report("attention", args, results, where)


if __name__ == "__main__":
    main()
