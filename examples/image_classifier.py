"""An image classifier: a plain NNX module with batch norm and dropout, on the 1,797 digits of scikit-learn.

    python examples/image_classifier.py
    python examples/image_classifier.py --layout zero1    # the same losses

Expected: validation accuracy 0.984 after 200 steps, in half a minute on two cores (chance is 0.1).
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxtrain


class ConvNet(nnx.Module):
    """Two convolutions and two dense layers; nothing in it knows of jaxtrain or of a mesh."""

    def __init__(self, width: int = 32, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * width, rngs=rngs)
        self.dense = nnx.Linear(4 * 4 * 2 * width, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, image):
        """Returns the scores of the ten digits."""
        x = nnx.relu(self.norm1(self.conv1(image)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        return self.head(self.dropout(nnx.relu(self.dense(x))))


def loss(model, batch, key):
    """Cross-entropy as (sum, weight), so that no split of the batch changes it. `key` is for dropout: flax uses it."""
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return {"cross_entropy": (jnp.sum(nats), jnp.float32(len(nats)))}


def accuracy(model, batch):
    """Share of the rows whose highest score is the label's."""
    right = jnp.argmax(model(batch["image"]), -1) == batch["label"]
    return jnp.sum(right), jnp.float32(len(right))


def digits() -> tuple[dict, dict]:
    """Training and validation arrays; pixels from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        (images / 16).reshape(-1, 8, 8, 1).astype("float32"), labels.astype("int32"), test_size=256, random_state=0
    )
    return {"image": parts[0], "label": parts[2]}, {"image": parts[1], "label": parts[3]}


def main() -> None:
    """Trains, validates, and reads ten digits."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--layout", default="fsdp", help="any layout: ddp, zero1, fsdp...")
    arguments.add_argument("--out", default="runs", help="folder for the run")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    given = arguments.parse_args()
    train, validation = digits()
    trainer = jaxtrain.Trainer(
        {"data": {"global_batch": 64}, "eval": {"every": 50, "batches": 4}, "precision": "fp32"},
        name="digits",
        dir=given.out,
        simulate=8,
        layout=given.layout,
        steps=30 if given.quick else 200,
        model=ConvNet,
        loss=loss,
        metrics={"accuracy": accuracy},
        data=train,
        eval_data=validation,
        optimizer=optax.adamw(optax.cosine_decay_schedule(3e-3, 200)),
    )
    result = trainer.fit()
    print(f"eval/accuracy {result.metrics['eval/accuracy']:.3f}")
    scores = jax.device_get(trainer.predict(validation["image"][:16]))
    print("read", *scores.argmax(-1), "\ntrue", *validation["label"][:16])


if __name__ == "__main__":
    main()
