"""A callback: measure something in every step, act on it, and keep its state in checkpoints.

This one logs the norm of the parameters, asks for a validation when the loss is at a new low, and ends the run after
some validations without a better accuracy.

    python examples/callback.py

Expected: ends by itself after 350 of at most 600 steps, best validation accuracy 0.992, in a minute on two cores.
"""

import argparse

import jax
import optax
from image_classifier import ConvNet, accuracy, digits, loss

import jaxtrain

NORM = jax.jit(optax.global_norm)  # one program; nothing waits for it


class StopWhenFlat(jaxtrain.Callback):
    """Validates when the loss has fallen by a tenth; ends the run after `patience` validations without a better one."""

    def __init__(self, patience: int = 4):
        self.patience, self.lowest, self.best, self.waited = patience, float("inf"), 0.0, 0

    def on_step_end(self, trainer, step):
        """Adds the norm of the parameters, which stays on the device until it is logged, and asks for a validation."""
        trainer.add_metrics({"parameter_norm": NORM(trainer.state["params"])})
        if trainer.latest_metrics.get("loss", float("inf")) < 0.9 * self.lowest:
            self.lowest = trainer.latest_metrics["loss"]
            trainer.request_evaluate("the loss is at a new low")

    def on_evaluate(self, trainer, step, scores):
        """Counts the validations since the best one."""
        self.waited = 0 if scores["eval/accuracy"] > self.best else self.waited + 1
        self.best = max(self.best, scores["eval/accuracy"])
        if self.waited >= self.patience:
            trainer.request_stop(f"no better accuracy in {self.patience} validations")

    def state_dict(self):
        """Returns what a checkpoint holds, so that a resumed run decides as an uninterrupted one."""
        return {"lowest": self.lowest, "best": self.best, "waited": self.waited}

    def load_state_dict(self, state):
        """Takes it back."""
        self.lowest, self.best, self.waited = state["lowest"], state["best"], state["waited"]


def main() -> None:
    """Trains until the accuracy stays."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", default="runs", help="folder for the run")
    arguments.add_argument("--quick", action="store_true", help="a few steps, to see that it works")
    given = arguments.parse_args()
    train, validation = digits()
    watcher = StopWhenFlat()
    result = jaxtrain.train(
        {"data": {"global_batch": 64}, "eval": {"every": 50, "batches": 4}, "precision": "fp32"},
        name="callback",
        dir=given.out,
        simulate=8,
        layout="fsdp",
        steps=30 if given.quick else 600,
        model=ConvNet,
        loss=loss,
        metrics={"accuracy": accuracy},
        data=train,
        eval_data=validation,
        optimizer=optax.adamw(1e-3),
        callbacks=[watcher],
    )
    print(f"best eval/accuracy {watcher.best:.3f}, stopped by: {result.stopped_by}")


if __name__ == "__main__":
    main()
