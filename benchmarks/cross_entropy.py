"""Memory and time of the vocabulary-chunked cross-entropy compared with full logits: loss and both gradients.

    python benchmarks/cross_entropy.py [--rows 8192] [--embed 2048] [--vocab 128256] [--chunks 1 4 8 16]
                                       [--dtype bfloat16] [--repeats 5] [--measure] [--quick] [--out cross_entropy.json]

`temporaries` is the memory of the compiled program without arguments and results (`memory_analysis`), known without a
run. It is compared with one float32 copy of the full logits. Time, with `--measure`, is the median of interleaved runs.
`full` is the plain form: logits, log-softmax, automatic differentiation.
"""

from __future__ import annotations

import argparse

import common
import jax
import jax.numpy as jnp

from jaxtrain.kernels.cross_entropy import cross_entropy


def full(x, head, targets, weights):
    """Returns the mean loss, with the logits of the whole batch in memory."""
    logits = jnp.einsum("btd,dv->btv", x, head.astype(x.dtype), preferred_element_type=jnp.float32)
    label = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - label)) / weights.sum()


def chunked(chunks: int):
    """Returns a function of the mean loss by the fused kernel."""

    def loss(x, head, targets, weights):
        total, weight = cross_entropy(x, head, targets, weights, chunks=chunks)["cross_entropy"]
        return total / weight

    return loss


def programs(args: argparse.Namespace) -> dict[str, jax.stages.Compiled]:
    """Compiles loss and gradients, by name."""
    shapes = (
        jax.ShapeDtypeStruct((1, args.rows, args.embed), args.dtype),
        jax.ShapeDtypeStruct((args.embed, args.vocab), jnp.float32),
        jax.ShapeDtypeStruct((1, args.rows), jnp.int32),
        jax.ShapeDtypeStruct((1, args.rows), jnp.float32),
    )
    losses = {"full": full} | {f"chunks {n}": chunked(n) for n in args.chunks}
    return {
        name: jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
        for name, loss in losses.items()
    }


def measure(compiled: dict[str, jax.stages.Compiled], args: argparse.Namespace) -> dict[str, float]:
    """Returns the median seconds of each program, of interleaved runs."""
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (
        jax.random.normal(keys[0], (1, args.rows, args.embed), args.dtype),
        jax.random.normal(keys[1], (args.embed, args.vocab)) * args.embed**-0.5,
        jax.random.randint(keys[2], (1, args.rows), 0, args.vocab, jnp.int32),
        jnp.ones((1, args.rows), jnp.float32),
    )
    return common.medians(compiled, arrays, args.repeats)


def main() -> None:
    """Prints the table and writes the JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8192, help="tokens")
    parser.add_argument("--embed", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--dtype", default="bfloat16", help="compute dtype; the head is float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help="also run the programs")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.embed, args.vocab, args.chunks, args.repeats = 64, 64, 2048, [1, 4], 1

    compiled = programs(args)
    seconds = measure(compiled, args) if args.measure else {}
    logits = args.rows * args.vocab * 4
    where = common.machine()
    print(common.title(where))
    print(f"{args.rows} tokens x {args.embed} -> {args.vocab} ids, {args.dtype}; full logits {logits / 2**20:.0f} MiB")
    print(f"{'':12}{'temporaries MiB':>18}{'of the logits':>16}{'ms':>10}{'tokens/s':>12}")
    results = []
    for name, program in compiled.items():
        temporaries = program.memory_analysis().temp_size_in_bytes
        row = {"name": name, "temporaries": temporaries, "seconds": seconds.get(name)}
        results.append(row)
        speed = f"{row['seconds'] * 1e3:10.1f}{args.rows / row['seconds']:12.0f}" if row["seconds"] else ""
        print(f"{name:12}{temporaries / 2**20:18.0f}{temporaries / logits:16.2f}{speed}")
    common.report("cross_entropy", args, results, where)


if __name__ == "__main__":
    main()
