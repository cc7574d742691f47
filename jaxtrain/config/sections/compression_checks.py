"""Checks of the compression of what replicas exchange."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxtrain.config.sections.islands import STALE
from jaxtrain.config.sections.sync import FIRST_SHARE, GRADIENT_KEYS

if TYPE_CHECKING:
    from jaxtrain.config.schema import Config

Found = tuple[tuple[str, ...], str]  # keys, message


def compression_problems(config: Config) -> Iterator[Found]:
    """Yields the keys and the message of what does not fit the strategy or the optimizer."""
    sync, compress = config.sync, config.sync.compress
    has_islands = config.islands.has_islands
    if sync.is_builtin and "compress" in sync.unread():
        for name, default in (("deltas", "none"), ("gradients", "none"), ("weights", "none"), ("secondary", 0)):
            if getattr(compress, name) != default:
                message = f"{sync.strategy} exchanges parameters as they are; expected {default}"
                other = "bsp" if name == "gradients" else "diloco"
                yield (f"sync.compress.{name}", "sync.strategy"), f"{message}, or sync.strategy={other}"
    if (sync.strategy == "bsp" or (sync.is_stale and has_islands)) and compress.deltas != "none":
        message = (
            f"{sync.strategy} exchanges gradients; expected none (see sync.compress.gradients), or sync.strategy=diloco"
        )
        yield ("sync.compress.deltas", "sync.strategy"), message
    if sync.strategy not in STALE and compress.gradients != "none" and "compress" not in sync.unread():
        message = f"{sync.strategy} exchanges changes of parameters; expected none (see sync.compress.deltas), or bsp"
        yield ("sync.compress.gradients", "sync.strategy"), message
    if sync.is_compressed and compress.gradients == "topk" and compress.momentum:
        optimizer = config.optimizer
        if optimizer.name != "sgd" or optimizer.betas[0]:
            message = f"{compress.momentum:g} takes the place of the optimizer's; expected optimizer.name=sgd with"
            keys = ("sync.compress.momentum", "optimizer.name", "optimizer.betas")
            yield keys, f"{message} optimizer.betas=[0, ...], or 0"
    if sync.is_compressed and "warmup" in GRADIENT_KEYS.get(compress.gradients, ()) and compress.warmup:
        yield from _warmup_problems(config)
    if sync.is_onebit_adam:
        yield from _onebit_adam_problems(config)
    if sync.changes_gathers and config.model.moe is not None:
        name = "weights" if compress.weights != "none" else "secondary"
        message = "weights of experts are not gathered as those of other layers; expected the default, or no experts"
        yield (f"sync.compress.{name}", "model.moe"), message


def _warmup_problems(config: Config) -> Iterator[Found]:
    """Yields what keeps the warm-up from ending, that of topk in its share, within the run."""
    warmup, share = config.sync.compress.warmup, config.sync.compress.share
    if config.sync.compress.gradients == "topk" and share >= FIRST_SHARE:
        message = f"the warm-up begins with a share of {FIRST_SHARE}, and that after it is {share:g}; expected warmup=0"
        yield ("sync.compress.warmup", "sync.compress.share"), f"{message}, or a smaller share"
    if config.epochs is None and warmup >= config.steps:
        message = f"of {config.steps} steps none comes after {warmup} of warm-up; expected less than steps"
        yield ("sync.compress.warmup", "steps"), message


def _onebit_adam_problems(config: Config) -> Iterator[Found]:
    """Yields what keeps the second moment of Adam from being frozen within the run."""
    name, freeze = config.optimizer.name, config.sync.compress.freeze
    if name != "adamw":
        message = f"onebit_adam sends the momentum of Adam, and the optimizer is {name}; expected optimizer.name=adamw"
        yield ("sync.compress.gradients", "optimizer.name"), f"{message} (Adam with optimizer.weight_decay=0)"
    if config.epochs is None and freeze >= config.steps:
        message = f"of {config.steps} steps none comes after the freeze at {freeze}, so that nothing is compressed"
        yield ("sync.compress.freeze", "steps"), f"{message}; expected less than steps"


def compresses_over_data(config: Config) -> bool:
    """Returns whether gradients travel compressed along the mesh axis `data`; a size of -1 counts as several."""
    return config.sync.replica_axis({"replica": config.mesh.replica, "data": config.mesh.data}) == "data"


def compression_notes(config: Config) -> list[str]:
    """Returns a line for each compression without effect."""
    notes = []
    has_one = config.mesh.replica == config.mesh.data == 1 and not config.islands.has_islands
    if config.sync.is_compressed and has_one:
        notes.append("sync.compress.gradients: one replica sends nothing; expected mesh.replica or mesh.data > 1")
    if config.sync.changes_gathers and config.mesh.fsdp == 1 and config.zero < 3:
        notes.append("sync.compress: no weights are gathered; expected mesh.fsdp > 1 for weights and secondary")
    return notes
