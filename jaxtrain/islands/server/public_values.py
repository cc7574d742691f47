"""Parameters as islands hold them, whom the updates of a server reach in few bits.

An update sends the message Q(x - public) of the exact parameters x, and public moves by what it decodes to, as the
values of all islands do. So what a message has lost is in the next one, with error feedback or without: x - public is
the residual, and nothing has to keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.islands.blocks import EncodedBlock, encode
from jaxtrain.islands.partition import Spec
from jaxtrain.islands.trees import Flat, Path
from jaxtrain.sharding.quantized_blocks import Bits
from jaxtrain.sync.quantized_mean import is_sent_in_blocks

Message = Mapping[Path, "EncodedBlock | np.ndarray"]  # changes in few bits; of other tensors their values


class PublicValues:
    """Encodes the updates of one server. Its arrays are those of `paths`, in that order, float32.

    Args:
        specs: tensors, or parts of them, that the server holds.
        bits: of a value; 0: nothing is encoded, and there are no messages.
    """

    def __init__(self, specs: Mapping[Path, Spec], bits: Bits) -> None:
        self.bits = bits
        self.paths = [
            path for path, spec in specs.items()
            if path[0] == "params" and is_sent_in_blocks(spec.shape, spec.dtype, spec.shape, bits)
        ]  # fmt: skip

    def begin(self, exact: Flat) -> list[np.ndarray]:
        """Returns the values that are read at the start: the exact ones."""
        return [np.asarray(exact[path]).astype(np.float32) for path in self.paths]

    def update(self, public: Sequence[np.ndarray], exact: Flat) -> tuple[Message, list[np.ndarray]]:
        """Returns the message after an update, and the values of islands that have read it."""
        messages = self._encode([exact[path] for path in self.paths], list(public))
        blocks = [
            EncodedBlock(np.asarray(message), x.shape[-1], self.bits)
            for message, x in zip(messages, public, strict=True)
        ]
        moved = [np.add(x, block.decode()) for x, block in zip(public, blocks)]
        message: Message = {**exact, **dict(zip(self.paths, blocks))}
        return message, moved

    @cached_property
    def _encode(self) -> Any:
        return jax.jit(
            lambda exact, public: [encode(x.astype(jnp.float32) - y, self.bits) for x, y in zip(exact, public)]
        )


def with_message(values: Mapping[Path, np.ndarray], message: Message) -> Flat:
    """Returns what an island holds after a message. A sum of its own, which is rounded as that of the server is."""
    return {
        path: np.add(values[path], change.decode()) if isinstance(change, EncodedBlock) else change
        for path, change in message.items()
    }
