"""Contrastive learning: each row's loss depends on all rows of the batch, which lie on 8 devices.

Two encoders see the upper and the lower half of a digit, and learn which halves belong together (as CLIP does with
pictures and texts). A loss that was computed on each device's rows alone would compare 16 halves; here all 128 are
compared, on every layout, because a loss sees all rows of a microbatch.

    python examples/contrastive.py
    python examples/contrastive.py --verify    # losses and gradients of every layout against one device

Expected after 400 steps: the right half of 128 is found for 0.516 of the validation rows (chance is 0.008), in
half a minute on two cores.
"""

import argparse

import jax.numpy as jnp
import optax
from flax import nnx
from image_classifier import digits

import jaxtrain


class Encoder(nnx.Module):
    """Half a digit, 32 pixels, to a direction in 32 dims."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(32, 256, rngs=rngs)
        self.middle = nnx.Linear(256, 256, rngs=rngs)
        self.down = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, half):
        """Returns directions of length 1."""
        x = self.down(nnx.gelu(self.middle(nnx.gelu(self.up(half)))))
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class Halves(nnx.Module):
    """An encoder for each half, and the sharpness of the comparison."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.upper, self.lower = Encoder(rngs=rngs), Encoder(rngs=rngs)
        self.sharpness = nnx.Param(jnp.log(jnp.float32(10.0)))

    def __call__(self, upper, lower):
        """Returns how well each upper half (rows) fits each lower half (columns)."""
        return jnp.exp(self.sharpness[...]) * self.upper(upper) @ self.lower(lower).T


def loss(model, batch):
    """Cross-entropy of both directions: the right half among all of the batch."""
    scores, own = model(batch["upper"], batch["lower"]), jnp.arange(len(batch["upper"]))
    both = [optax.softmax_cross_entropy_with_integer_labels(side, own) for side in (scores, scores.T)]
    return {"contrast": (jnp.sum(both[0] + both[1]) / 2, jnp.float32(len(own)))}


def matched(model, batch):
    """Share of the upper halves whose best lower half is their own."""
    scores = model(batch["upper"], batch["lower"])
    right = jnp.argmax(scores, -1) == jnp.arange(len(scores))
    return jnp.sum(right), jnp.float32(len(right))


def halves() -> list[dict]:
    """Training and validation arrays: 4 lines of 8 pixels each."""
    parts = [part["image"].reshape(-1, 64) for part in digits()]
    return [{"upper": part[:, :32], "lower": part[:, 32:]} for part in parts]


def main() -> None:
    """Trains on one layout; with --verify compares all layouts with one device."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layout", default="fsdp", help="any layout: ddp, zero1, fsdp...")
    arguments.add_argument("--out", default="runs", help="folder for the run")
    arguments.add_argument("--verify", action="store_true", help="compare losses and gradients of the layouts")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    given = arguments.parse_args()
    train, validation = halves()
    config = {"data": {"global_batch": 128}, "eval": {"every": 100, "batches": 2}, "precision": "fp32"}
    config |= {"name": "contrastive", "dir": given.out, "simulate": 8, "layout": given.layout}
    if given.verify:
        print(jaxtrain.verify(config, model=Halves, loss=loss, data=train))
        return
    result = jaxtrain.train(
        config,
        steps=40 if given.quick else 400,
        model=Halves,
        loss=loss,
        metrics={"matched": matched},
        data=train,
        eval_data=validation,
        optimizer=optax.adamw(2e-3, weight_decay=0.1),
    )
    print(f"eval/matched {result.metrics['eval/matched']:.3f}")


if __name__ == "__main__":
    main()
