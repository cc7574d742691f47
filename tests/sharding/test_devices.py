"""Which device stands where, of devices that are not there."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from jaxtrain.sharding import devices


@dataclass(frozen=True)
class Chip:
    """What JAX's mesh utilities ask of a TPU."""

    id: int
    slice_index: int
    coords: tuple[int, int, int]
    process_index: int = 0
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v5"


def test_an_axis_may_take_a_part_of_a_slices_dim():
    """8 x 2 of 4 x 4 chips: one of the two axes has half of a dim of the torus, in one slice as in several."""
    chips = [Chip(16 * s + 4 * y + x, s, (x, y, 0)) for s, y, x in product(range(2), range(4), range(4))]
    grid = devices._hybrid([1, 1, 2, 8, 1, 1, 1], [1, 1, 2, 1, 1, 1, 1], chips)
    assert grid.shape == (1, 1, 4, 8, 1, 1, 1)
    assert len({chip.id for chip in grid.flat}) == 32
    for replica, row in enumerate(grid.reshape(4, 8)):
        assert {chip.slice_index for chip in row} == {replica // 2}
