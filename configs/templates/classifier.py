"""An image classifier, and images to try it on. Nothing of jaxtrain is imported."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Model(nnx.Module):
    """Convolution net with batch norm and dropout."""

    def __init__(self, width=16, classes=4, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, rngs=rngs)
        self.conv2 = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(2 * width, classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.drop(x.max((1, 2))))


def loss(model, batch):
    """Returns {name: (sum, weight)} of the loss, and of metrics: sums, so that any split of the rows adds up."""
    logits, labels = model(batch["image"]), batch["label"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    rows = jnp.float32(len(labels))
    right = jnp.sum(jnp.argmax(logits, -1) == labels).astype(jnp.float32)
    return {"cross_entropy": (jnp.sum(nats), rows)}, {"accuracy": (right, rows)}


class Images:
    """Small images of four shapes in noise: a box, a cross, a diagonal and a frame.

    Put your own in place: any class with this constructor and `batch`. What `batch` returns depends on its arguments
    alone, so a resumed run sees the same rows, and each of several hosts reads only its own.
    """

    SIZE = 12

    def __init__(self, split, seed, global_batch, noise=0.3):
        self.seed, self.rows, self.noise = [seed, split == "train"], global_batch, noise

    def batch(self, step, rows=None):
        """Returns the rows (a slice or indices; default: all) of a step as {name: array}."""
        images, labels = [], []
        for index in np.arange(self.rows)[slice(None) if rows is None else rows]:
            rng = np.random.default_rng([*self.seed, step, int(index)])
            label, size = int(rng.integers(4)), int(rng.integers(4, 8))
            top, left = rng.integers(0, self.SIZE - size, 2)
            image = rng.normal(0, self.noise, (self.SIZE, self.SIZE))
            image[top : top + size, left : left + size] += self.shape(label, size)
            images.append(image[..., None])
            labels.append(label)
        return {"image": np.float32(images), "label": np.int32(labels)}

    @staticmethod
    def shape(label, size):
        """Returns the picture of a label."""
        picture = np.zeros((size, size))
        if label == 0:
            picture[:] = 1
        elif label == 1:
            picture[size // 2, :] = picture[:, size // 2] = 1
        elif label == 2:
            np.fill_diagonal(picture, 1)
        else:
            picture[[0, -1], :] = picture[:, [0, -1]] = 1
        return picture
