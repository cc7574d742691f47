"""Your own optax optimizer, and groups of parameters with their own learning rate.

The optimizer steps by the sign of an average of the gradients, for matrices scaled by their width. The config names it,
so that a resumed run needs no script; what it keeps is sharded like the parameter that it belongs to.

    python examples/own_optimizer.py

Expected: validation accuracy 0.996 after 200 steps, in half a minute on two cores (chance is 0.1).
"""

import argparse
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from image_classifier import ConvNet, accuracy, digits, loss

import jaxtrain


class Average(NamedTuple):
    """What the optimizer keeps: an average of the gradients, like the parameters."""

    gradients: optax.Updates


def sign_of_average(learning_rate: optax.ScalarOrSchedule, decay: float = 0.9) -> optax.GradientTransformation:
    """Returns steps of one size, in the direction of the averaged gradient."""

    def init(params):
        return Average(jax.tree.map(jnp.zeros_like, params))

    def update(gradients, state, params=None):
        average = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.gradients, gradients)
        steps = jax.tree.map(lambda value: jnp.sign(value) / max(value.shape[-1:] or (1,)) ** 0.5, average)
        return steps, Average(average)

    return optax.chain(optax.GradientTransformation(init, update), optax.scale_by_learning_rate(learning_rate))


def main() -> None:
    """Trains a convolution net with it, its head at a third of the rate."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", default="runs", help="folder for the run")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    given = arguments.parse_args()
    train, validation = digits()
    result = jaxtrain.train(
        {"data": {"global_batch": 64}, "eval": {"every": 50, "batches": 4}, "precision": "fp32"},
        name="signs",
        dir=given.out,
        simulate=8,
        layout="zero1",  # each device keeps an eighth of the averages
        steps=30 if given.quick else 200,
        model=ConvNet,
        loss=loss,
        metrics={"accuracy": accuracy},
        data=train,
        eval_data=validation,
        optimizer={
            "name": "own_optimizer:sign_of_average",  # module:function, of a module that Python finds
            "lr": 3e-3,  # with the schedule: the argument `learning_rate`
            "options": {"decay": 0.95},
            "groups": [{"match": ["head/.*"], "lr_factor": 0.3}],
        },
        schedule={"name": "cosine", "warmup_steps": 10},
        callbacks=[jaxtrain.LearningRateMonitor()],  # logs the rate of each group
    )
    print(f"eval/accuracy {result.metrics['eval/accuracy']:.3f}")


if __name__ == "__main__":
    main()
