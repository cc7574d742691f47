"""Pictures of README and docs, drawn from real programs.

The loss of one model on three layouts, which device holds which shard, what a step sends, and a pipeline schedule.

Trains configs/quickstart.yaml for 60 steps on each of three layouts, compiles it for others on simulated devices, and
writes SVG files to docs/images. `--out` gets the losses and the bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import common
import numpy as np

import jaxtrain

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WEIGHT = "layers/mlp/up"  # [layers, embed, mlp]
LAYOUTS = {"ddp": {"data": 8}, "fsdp": {"fsdp": 8}, "3d": {"data": 2, "fsdp": 2, "model": 2}}
MORE = {"ddp": {"data": 8}, "zero1": {"data": 8}, "hsdp": {"data": 2, "fsdp": 4}, "fsdp": {"fsdp": 8},
        "tp": {"data": 2, "model": 4}, "3d": {"data": 2, "fsdp": 2, "model": 2}}  # fmt: skip
COLOURS = ("#3b74c0", "#d5812d", "#4c9a4c", "#b4509a", "#14909b", "#c9474f", "#8a6a4a", "#868d96")
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 11px } .dim { fill: #656d76 }
.bold { font-weight: 600 } .outline { fill: #d0d7de55; stroke: #8c959f; stroke-width: .7 } .axis { stroke: #8c959f }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .dim { fill: #9198a1 } }
</style>"""
Index = tuple[slice, ...]


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = "", style: str = "", title: str = "") -> str:
    paint = f'fill="{fill}"' if fill else f'class="{style}"'
    said = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect {paint} x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}">{said}</rect>'


def write(name: str, width: float, height: float, label: str, parts: Iterable[str]) -> None:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(label)}"'
    body = "\n".join(parts)
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}\n{body}\n</svg>\n')


def trainer(layout: str, mesh: dict[str, int], folder: str, steps: int) -> jaxtrain.Trainer:
    return jaxtrain.Trainer(
        "quickstart", layout=layout, mesh=mesh, name=layout, dir=folder, steps=steps, optimizer={"lr": 1e-3},
        schedule={"warmup_steps": min(10, steps)}, eval={"every": steps}, checkpoint={"every": steps},
        log={"sample_tokens": 0},
    )  # fmt: skip


def leaf(tree: Any, path: str) -> Any:
    """The array whose path ends so, of a tree of dicts, tuples and named tuples."""
    import jax

    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = [
        "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in keys) for keys, _ in found
    ]
    return next(array for name, (_, array) in zip(names, found) if name.endswith(path))


def parts_of(array: Any) -> list[Index]:
    """The part of a [layers, rows, columns] array that each device holds, of one layer, in the order of devices."""
    held = array.sharding.devices_indices_map(array.shape)
    return [tuple(index[1:]) for _, index in sorted(held.items(), key=lambda item: item[0].id)]


def shards(x: float, y: float, parts: Sequence[Index], shape: Sequence[int], cell: float) -> list[str]:
    """Draws a small matrix for each device, with the part that it holds; devices with the same part share a colour."""
    out, colour = [], {}
    height = cell * 0.62
    for device, part in enumerate(parts):
        spans = [index.indices(size)[:2] for index, size in zip(part, shape)]
        fill = colour.setdefault(str(spans), COLOURS[len(colour)])
        (top, bottom), (left, right) = ([at / size for at in span] for span, size in zip(spans, shape))
        at = x + device * (cell + 8)
        said = f"device {device}: rows {spans[0][0]} to {spans[0][1]}, columns {spans[1][0]} to {spans[1][1]}"
        out.append(box(at, y, cell, height, style="outline"))
        out.append(
            box(at + left * cell, y + top * height, (right - left) * cell, (bottom - top) * height, fill, title=said)
        )
    return out


def curves(x: float, y: float, width: float, height: float, losses: dict[str, list[float]]) -> list[str]:
    """Draws the losses over each other: a wide line below, narrower and dashed ones above."""
    values = np.concatenate([*losses.values()])
    low, high = float(values.min()), float(values.max())
    count = len(next(iter(losses.values())))
    out = [f'<path class="axis" fill="none" d="M{x} {y}V{y + height}H{x + width}"/>']
    looks = (("#8ecae6", 9, ""), ("#3b74c0", 4.5, ""), ("#d5812d", 2, "5 5"))
    for (name, series), (colour, thick, dash) in zip(losses.items(), looks):
        at = " ".join(
            f"{x + width * i / (count - 1):.1f},{y + height * (high - v) / (high - low):.1f}"
            for i, v in enumerate(series)
        )
        out.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="{thick}" stroke-dasharray="{dash}" points="{at}"/>'
        )
        line = y + 16 + 18 * list(losses).index(name)
        pen = f'stroke="{colour}" stroke-width="{thick}" stroke-dasharray="{dash}"'
        out.append(f'<path {pen} d="M{x + width - 96} {line - 4}h34"/>')
        out.append(text(x + width - 54, line, name))
    out.append(text(x - 6, y + 8, f"{high:.1f}", "small dim", "end"))
    out.append(text(x - 6, y + height, f"{low:.1f}", "small dim", "end"))
    out.append(text(x + width, y + height + 16, f"{count} steps", "small dim", "end"))
    return out


def one_model(
    losses: dict[str, list[float]], parts: dict[str, list[Index]], shape: Sequence[int], worst: float
) -> None:
    """Draws README's picture."""
    out = [text(20, 26, "one config, one line changed: who holds which part of a weight", "bold")]
    for index, (layout, mesh) in enumerate(LAYOUTS.items()):
        y = 48 + index * 82
        sizes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        out += [text(20, y + 12, f"layout: {layout}"), text(160, y + 12, sizes, "small dim")]
        out += shards(20, y + 22, parts[layout], shape, 52)
    out += [text(20 + device * 60 + 26, 292, f"{device}", "small dim", "middle") for device in range(8)]
    out.append(text(20, 310, "device", "small dim"))
    out.append(text(560, 26, "the same loss curve, three times", "bold"))
    out += curves(584, 44, 350, 224, losses)
    out.append(text(560, 310, f"largest difference of a loss: {worst:.0e}, float32 rounding", "small dim"))
    write("one-model.svg", 960, 322, "One model, three layouts: the shards of each device, and one loss curve", out)


def held(arrays: dict[str, tuple[list[Index], list[Index]]], shape: Sequence[int]) -> None:
    """Draws a weight and its optimizer state under each layout."""
    out = [text(170, 22, "a weight, on devices 0 to 7", "bold"), text(570, 22, "its average in Adam", "bold")]
    for index, (layout, (weight, state)) in enumerate(arrays.items()):
        y = 40 + index * 48
        sizes = " x ".join(f"{axis} {size}" for axis, size in MORE[layout].items())
        out += [text(12, y + 12, layout, "bold"), text(12, y + 27, sizes, "small dim")]
        out += shards(170, y, weight, shape, 36) + shards(570, y, state, shape, 36)
    write("shards.svg", 940, 40 + 48 * len(arrays), "Which device holds which part, under six layouts", out)


def sent(traffic: dict[str, dict[str, int]]) -> None:
    """Draws the bytes that a device sends in a step, by operation."""
    kinds = sorted({kind for row in traffic.values() for kind in row})
    most = max(sum(row.values()) for row in traffic.values())
    out = [
        box(120 + 150 * i, 10, 12, 12, COLOURS[i]) + text(138 + 150 * i, 21, kind, "small")
        for i, kind in enumerate(kinds)
    ]
    for index, (layout, row) in enumerate(traffic.items()):
        y, x = 36 + index * 30, 120.0
        out.append(text(12, y + 15, layout, "bold"))
        for kind, size in row.items():
            wide = 620 * size / most
            out.append(box(x, y, wide, 20, COLOURS[kinds.index(kind)], title=f"{kind}: {size / 1e6:.1f} MB"))
            x += wide
        out.append(text(x + 8, y + 15, f"{sum(row.values()) / 1e6:.1f} MB", "small dim"))
    write("traffic.svg", 840, 42 + 30 * len(traffic), "Bytes that a device sends in a step, under six layouts", out)


def pipeline() -> None:
    """Draws the table of a schedule."""
    from jaxtrain.pipeline.schedules.draw import COLORS
    from jaxtrain.pipeline.schedules.shipped import shipped_table

    table = shipped_table("1f1b", 4, 8, None)
    cell = 800 / table.ticks
    out = [text(12, 32 + 30 * stage, f"stage {stage}") for stage in range(4)]
    for tick, stage, task in table.tasks():
        x, y = 80 + tick * cell, 16 + 30 * stage
        out.append(
            box(
                x,
                y,
                cell - 1.5,
                24,
                COLORS[task.action][0],
                title=f"{task.action.name} of microbatch {task.microbatch}",
            )
        )
        at = f'class="small" x="{x + cell / 2:.1f}" y="{y + 16}" text-anchor="middle"'
        out.append(f'<text style="fill: #1f2328" {at}>{task.microbatch}</text>')
    out.append(
        text(
            80,
            152,
            "blue: forward of a microbatch; yellow: its backward; white: nothing to do, the bubble",
            "small dim",
        )
    )
    write("pipeline.svg", 900, 164, "The schedule 1f1b of four stages and eight microbatches, tick by tick", out)


def main() -> None:
    args = common.parser(__doc__).parse_args()
    steps = 6 if args.quick else 60
    losses: dict[str, list[float]] = {}
    arrays: dict[str, tuple[list[Index], list[Index]]] = {}
    shape: Sequence[int] = ()
    with tempfile.TemporaryDirectory() as folder:
        for layout, mesh in MORE.items():
            run = trainer(layout, mesh, folder, steps)
            if layout in LAYOUTS:
                losses[layout] = [step.metrics["loss"] for step in run.steps()]
            weight = leaf(run.state["params"], WEIGHT)
            arrays[layout] = parts_of(weight), parts_of(leaf(run.state["opt_state"], f"mu/{WEIGHT}"))
            shape = weight.shape[1:]
    traffic: dict[str, dict[str, int]] = {}
    for layout, mesh in MORE.items():
        rows = traffic[layout] = {}
        for one in jaxtrain.plan("quickstart", "simulate:8", layout=layout, mesh=mesh).traffic:
            rows[one.op] = rows.get(one.op, 0) + one.bytes
    table = np.array([*losses.values()])
    worst = float(np.max(np.abs(table - table[0])))
    draw: Sequence[Callable[[], None]] = (
        lambda: one_model(losses, {name: arrays[name][0] for name in LAYOUTS}, shape, worst),
        lambda: held(arrays, shape), lambda: sent(traffic), pipeline,
    )  # fmt: skip
    if not args.quick:
        for picture in draw:
            picture()
    print(f"largest difference of the losses: {worst:.1e}; sent in a step: {traffic}")
    results = {"losses": losses, "largest_difference": worst, "bytes_sent_in_a_step": traffic}
    common.report("pictures", args, results, common.machine())


if __name__ == "__main__":
    main()
