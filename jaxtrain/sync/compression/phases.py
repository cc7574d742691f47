"""Compression of the first steps of a run, where it is another one."""

from __future__ import annotations

from jaxtrain.config.sections.sync import FIRST_SHARE, CompressConfig


def first_phases(config: CompressConfig) -> list[tuple[int, CompressConfig]]:
    """Returns (end, compression) of the steps before those of the config itself.

    Those of `onebit_adam` before its freeze, and those of the warm-up of `powersgd`, send gradients in full. In the
    warm-up of `topk` the share is 1/4, 1/16, 1/64 and so on, each for as many steps, as long as it is larger than that
    of the config.
    """
    whole = {"onebit_adam": config.freeze, "powersgd": config.warmup}.get(config.gradients, 0)
    if whole:
        return [(whole, CompressConfig())]
    if config.gradients != "topk" or not config.warmup:
        return []
    shares = [FIRST_SHARE]
    while shares[-1] * FIRST_SHARE > config.share:
        shares.append(shares[-1] * FIRST_SHARE)
    ends = [config.warmup * (place + 1) // len(shares) for place in range(len(shares))]
    return [(end, config.model_copy(update={"share": share, "warmup": 0})) for end, share in zip(ends, shares)]
