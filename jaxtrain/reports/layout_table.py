"""Text report of a layout: the mesh, and every parameter with its sizes and mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxtrain.sharding.rules import LAYERS

MOST_ROWS = 40
WIDE = 100  # columns from which logical names get a column of their own


@dataclass(frozen=True)
class ParameterRow:
    """Row of one parameter: `axes` are the mesh axes of every dim, `bytes` those on one device."""

    name: str
    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    axes: tuple[tuple[str, ...], ...]
    bytes: int

    @property
    def count(self) -> int:
        """Number of parameters."""
        return prod(self.shape)


def parameter_rows(
    params: Mapping[str, Any],
    names: Mapping[str, Any],
    stored: Callable[[Sequence[str | None], Sequence[int]], Sequence[tuple[str, ...]]],
    sizes: Mapping[str, int],
) -> list[ParameterRow]:
    """Returns a row for every parameter of a nested dict.

    Args:
        params: leaves with `shape` and `dtype` (arrays or ShapeDtypeStructs).
        names: the same tree of logical-name tuples.
        stored: logical names and shape -> mesh axes per dim, such as `Sharder.stored`.
        sizes: mesh axis -> size.
    """
    rows: list[ParameterRow] = []
    for key, leaf in params.items():
        if isinstance(leaf, Mapping):
            rows += [
                ParameterRow(f"{key}/{row.name}", row.shape, row.names, row.axes, row.bytes)
                for row in parameter_rows(leaf, names[key], stored, sizes)
            ]
            continue
        axes = tuple(stored(names[key], leaf.shape))
        local = prod(ceil(n / prod(sizes.get(a, 1) for a in dim)) for n, dim in zip(leaf.shape, axes))
        rows.append(ParameterRow(str(key), tuple(leaf.shape), tuple(names[key]), axes, local * leaf.dtype.itemsize))
    return rows


def mesh_line(layout: str, sizes: Mapping[str, int], device: str) -> str:
    """Returns `devices   16 x cpu, layout fsdp_tp: data 2 x fsdp 2 x model 4`, with the axes larger than one."""
    shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return f"devices   {prod(sizes.values())} x {device}, layout {layout}" + (f": {shape}" if shape else "")


def model_line(rows: Sequence[ParameterRow]) -> str:
    """Returns `model     1,024,000 parameters, 512 KiB on each device`."""
    count, bytes = sum(row.count for row in rows), sum(row.bytes for row in rows)
    return f"model     {count:,} parameters, {format_bytes(bytes)} on each device"


def layout_report(
    rows: Sequence[ParameterRow], rules: Mapping[str, Sequence[str]], sizes: Mapping[str, int], width: int
) -> list[Table | str]:
    """Returns the parameter table, logical names that do not fit into it, and why dims are not sharded."""
    return [parameter_table(rows, width), *logical_names(rows, width), *unsharded_dims(rows, rules, sizes)]


def parameter_table(rows: Sequence[ParameterRow], width: int, most: int = MOST_ROWS) -> Table:
    """Builds the table of parameters: shape with the mesh axes of every dim, logical names if they fit, sizes, a total.

    Shows the `most` largest tensors, in the model's order.
    """
    largest = sorted(rows, key=lambda row: -row.count)[:most]
    shown = [row for row in rows if row in largest]
    table = Table(
        box=None, pad_edge=False, show_footer=True, padding=(0, 2, 0, 0), header_style="bold", footer_style="bold"
    )
    total, local = sum(row.count for row in rows), sum(row.bytes for row in rows)
    left = f" (and {len(rows) - len(shown)} smaller)" if len(rows) > len(shown) else ""
    table.add_column("parameter", footer=f"total{left}", no_wrap=True, overflow="ellipsis")
    table.add_column("shape/axis", no_wrap=True, overflow="ellipsis")
    if width >= WIDE:
        table.add_column("logical names", no_wrap=True, overflow="ellipsis")
    for title, footer in (("count", f"{total:,}"), ("per device", format_bytes(local))):
        least = max(len(title), len(footer))  # numbers must not be cut
        table.add_column(title, footer=footer, justify="right", no_wrap=True, min_width=least)
    for row in shown:
        names = [" ".join(name or "-" for name in row.names)] if width >= WIDE else []
        table.add_row(row.name, _placed(row), *names, f"{row.count:,}", format_bytes(row.bytes))
    return table


def logical_names(rows: Sequence[ParameterRow], width: int) -> list[str]:
    """Returns the logical names that do not fit into `parameter_table`, one line per set of names."""
    if width >= WIDE:
        return []
    found: dict[tuple[str | None, ...], list[str]] = {}
    for row in rows:
        found.setdefault(row.names, []).append(row.name)
    return [
        f"logical names: {' '.join(name or '-' for name in names)}: {', '.join(who)}" for names, who in found.items()
    ]


def unsharded_dims(
    rows: Sequence[ParameterRow], rules: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> list[str]:
    """Returns the reasons why dims are not sharded, one line each; nothing on one device.

    Args:
        rows: the parameters.
        rules: logical name -> mesh axes.
        sizes: mesh axis -> size.
    """
    if prod(sizes.values()) == 1:
        return []
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        for dim, (name, axes) in enumerate(zip(row.names, row.axes)):
            if prod(sizes.get(axis, 1) for axis in axes) > 1 or row.shape[dim] == 1:
                continue
            reason, who = _reason_unsharded(row, dim, name, rules)
            reasons.setdefault(reason, {})[who] = None
    return [f"unsharded: {', '.join(who)}: {reason}" for reason, who in reasons.items()]


def _reason_unsharded(
    row: ParameterRow, dim: int, name: str | None, rules: Mapping[str, Sequence[str]]
) -> tuple[str, str]:
    """Returns (reason why a dim is not sharded, name to report: the dim's logical name, or the tensor)."""
    if name is None:
        return "dims without a logical name", f"{row.name} (dim {dim})"
    if name == LAYERS and rules.get(LAYERS):
        return f"the stages of {' x '.join(rules[LAYERS])} do not divide them, and spread another dim", name
    if name == LAYERS:
        return "a scan takes the layers one by one", name
    if name == "kv_shared":
        return "fewer key/value heads than shards; their weights are repeated for use", name
    if rules.get(name):
        return (
            f"the layout gives it {' x '.join(rules[name])}, which on this mesh is one device or used by another dim",
            name,
        )
    return "no rule in the layout", name


def _placed(row: ParameterRow) -> Text:
    """Formats a shape with mesh axes: `4 256/fsdp 4/model 64`."""
    text = Text()
    for n, axes in zip(row.shape, row.axes):
        text.append(f"{' ' if text else ''}{n}")
        if axes:
            text.append("/" + "+".join(axes), style="cyan")
    return text


def format_bytes(value: float) -> str:
    """Formats bytes as 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
