"""Public training runs: hardware, configuration as their sources state it, and tokens/s a device.

`known` relates a run to the constants of `jaxtrain.planning.hardware.calibration`: `fitted` if those of its chip were
fitted to it or chosen when it was known, so that agreement proves little; else `test`. No `test` of H100 is blind: all
its runs were known when the one to fit was chosen. No run of A100 was known.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MOSAIC = "mosaicml/llm-foundry scripts/train/benchmarking/README.md"
_TITAN = "pytorch/torchtitan docs/performance.md"
_TITAN_H100 = "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md"
_MAXTEXT = "AI-Hypercomputer/maxtext docs/reference/models/tiering.md, benchmarks/maxtext_trillium_model_configs.py"
_V5P = "AI-Hypercomputer/maxtext MaxText/configs/v5p (README.md, 32b.sh)"
_V5E = "AI-Hypercomputer/maxtext MaxText/configs/v5e (README.md, 16b.sh)"
_TOOLBOX = "NVIDIA/JAX-Toolbox rosetta/rosetta/projects/maxtext"


@dataclass(frozen=True)
class Run:
    """One published run.

    Args:
        target: as `jaxtrain.planning.hardware.targets.parse` takes it.
        rate: tokens/s a device.
        keys: config that reproduces the run.
        vocab: rows of the embedding table.
        known: `fitted` or `test`, see above.
        apart: differences from the published run, or what its source does not state.
        flags: LIBTPU_INIT_ARGS to compile with.
    """

    name: str
    target: str
    rate: float
    vocab: int
    keys: tuple[str, ...]
    source: str
    known: str = "test"
    apart: str = ""
    flags: str = ""


def _keys(
    model: Iterable[str], devices: int, length: int, rows: int, remat: str = "full", *more: str, accumulate: int = 1
) -> tuple[str, ...]:
    """Keys for FSDP over all devices, with this number of rows a device in a microbatch."""
    saved = remat.strip("[]").split(",") if remat.startswith("[") else []
    return (
        *model, "layout=fsdp", f"mesh.fsdp={devices}", f"data.sequence={length}",
        f"data.global_batch={rows * devices * accumulate}", "data.validation_fraction=0", "precision=bf16",
        f"step.remat={'full' if saved else remat}",
        *(f"step.remat_save.{name}=device" for name in saved), f"step.microbatches={accumulate}", *more,
    )  # fmt: skip


def _shape(embed: int, layers: int, heads: int, mlp: int, *more: str) -> tuple[str, ...]:
    sizes = {"embed": embed, "layers": layers, "heads": heads, "mlp": mlp}
    return ("configs/models/llama2_7b.yaml", *(f"model.{name}={size}" for name, size in sizes.items()), *more)


_MPT_SHAPES = {"1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32), "13b": (5120, 40, 40),
               "30b": (7168, 48, 56), "70b": (8192, 80, 64)}  # fmt: skip


def _mpt(chip: str, size: str, length: int, gpus: int, rows: int, accumulate: int, rate: float, again: bool) -> Run:
    """A row of MosaicML's tables: FULL_SHARD, amp_bf16, with activation checkpointing of layers or none."""
    embed, layers, heads = _MPT_SHAPES[size]
    model = _shape(embed, layers, heads, 4 * embed, "model.activation=gelu", "model.tie_embeddings=true")
    nodes, per_node = max(1, gpus // 8), min(gpus, 8)
    keys = _keys(model, gpus, length, rows, "full" if again else "none", accumulate=accumulate)
    apart = "rotary embeddings and RMSNorm here, learned positions and LayerNorm there"
    name = f"MPT {size}, {length} tokens{', full remat' if again else ''}"
    return Run(name, f"{chip}:{nodes}x{per_node}", rate, 50368, keys, _MOSAIC, apart=apart)


def _titan(name: str, model: Iterable[str], length: int, rows: int, remat: str, rate: float, vocab: int) -> Run:
    """torchtitan on 64 A100, FSDP only."""
    apart = "the network between nodes is not said; 8 x 200 Gb/s a node here"
    return Run(name, "a100:8x8", rate, vocab, _keys(model, 64, length, rows, remat), _TITAN, apart=apart)


_LLAMA3_8B, _LLAMA2_7B, _LLAMA3_70B, _LLAMA3_405B = (
    (f"configs/models/{name}.yaml",) for name in ("llama3_8b", "llama2_7b", "llama3_70b", "llama3_405b")
)
_LLAMA2_13B = _shape(5120, 40, 40, 13824)
_LLAMA2_70B = (*_shape(8192, 80, 64, 28672), "model.kv_heads=8")
_DOTS = "[q,k,v,attention,gate,up,residual]"  # what MaxText's minimal_flash saves
_405B = (  # weights are gathered once a step there, for all microbatches: whole in every replica of a stage here
    "configs/recipes/llama3_405b.yaml", "layout=pp", "mesh={pipeline: 8, data: 8, fsdp: 1, model: 8}", "zero=1",
    "rules.sequence=model", "data.validation_fraction=0",
)  # fmt: skip
_APART_405B = "Float8 and asynchronous tensor parallelism there, bfloat16 here; their H100 has 500 W and 2.4 TB/s"

GPUS = (
    Run(
        "Llama 2 7B, JAX-Toolbox", "h100:8", 11400, 32000, _keys(_LLAMA2_7B, 8, 4096, 2, _DOTS), _TOOLBOX,
        "fitted", "its rate is given as about 11.4k",
    ),
    Run(
        "Llama 3.1 8B, torchtitan", "h100:8", 6667, 128256, _keys(_LLAMA3_8B, 8, 8192, 2, "dots"), _TITAN_H100,
        apart="their H100 is another one: 500 W, HBM2e of 2.4 TB/s; selective remat there, `dots` here",
    ),
    Run(
        "Llama 3.1 8B on 128, torchtitan", "h100:16x8", 6514, 128256, _keys(_LLAMA3_8B, 128, 8192, 2, "dots"),
        _TITAN_H100, apart="as on 8",
    ),
    Run(
        "Llama 3.1 405B, 1F1B, torchtitan", "h100:64x8", 100, 128256, (*_405B, "pipeline.schedule=1f1b"), _TITAN_H100,
        apart=_APART_405B,
    ),
    Run(
        "Llama 3.1 405B, interleaved, torchtitan", "h100:64x8", 128, 128256,
        (*_405B, "pipeline.schedule=interleaved_1f1b"), _TITAN_H100, apart=_APART_405B,
    ),
    _mpt("h100", "1b", 2048, 8, 14, 1, 45455, False),
    _mpt("h100", "3b", 2048, 64, 6, 3, 22525, False),
    _mpt("h100", "7b", 2048, 8, 6, 1, 10643, False),
    _mpt("h100", "7b", 8192, 8, 8, 2, 6935, True),
    _mpt("h100", "13b", 2048, 8, 2, 1, 4792, False),
    _mpt("h100", "13b", 4096, 8, 10, 3, 4717, True),
    _mpt("h100", "30b", 2048, 16, 10, 3, 2263, True),
    _mpt("h100", "70b", 2048, 64, 8, 4, 1039, True),
    _mpt("a100", "3b", 2048, 8, 10, 2, 10811, False),
    _mpt("a100", "7b", 4096, 8, 16, 2, 3684, True),
    _mpt("a100", "13b", 2048, 8, 2, 3, 2262, False),
    _mpt("a100", "30b", 2048, 8, 3, 21, 916, True),
    _titan("Llama 2 13B, torchtitan", _LLAMA2_13B, 4096, 2, "none", 2162, 32000),
    _titan("Llama 3 70B, torchtitan", _LLAMA3_70B, 8192, 1, "full", 331, 128256),
)  # fmt: skip

TPUS = (
    Run(
        "Llama 2 70B, MaxText", "v5p:8x8x8", 692, 32000, _keys(_LLAMA2_70B, 512, 4096, 4, "[q,k,v,residual]"),
        _MAXTEXT, "fitted", "remat and batch are those of MaxText/configs/v5p/llama2_70b.sh",
    ),
    Run(
        "Llama 3.1 8B, MaxText", "v6e:16x16", 7207, 128256,
        _keys(_LLAMA3_8B, 256, 8192, 4, "full",
        "step.remat_save.input=host", "step.remat_save.q=host", "step.remat_save.k=host", "step.remat_save.v=host",
        "step.remat_save.residual=host"), _MAXTEXT, "fitted",
    ),
    Run(
        "Llama 3.1 70B, MaxText", "v6e:16x16", 960, 128256,
        _keys(_LLAMA3_70B, 256, 8192, 5, "full", "step.remat_save.input=host", "step.remat_save.q=host",
        "step.remat_save.k=host", "step.remat_save.v=host"), _MAXTEXT,
    ),
    Run(
        "Llama 2 70B, MaxText", "v6e:16x16", 900, 32000,
        _keys(_LLAMA2_70B, 256, 4096, 2, "full", "step.remat_save.q=host", "step.remat_save.k=host",
        "step.remat_save.v=host"), _MAXTEXT,
    ),
    Run(
        "Llama 3.1 405B, MaxText", "v6e:16x16", 123, 128256,
        (*_keys(_LLAMA3_405B, 64, 8192, 4, "full",
        "step.remat_save.input=host", "step.remat_save.q=host", "step.remat_save.k=host", "step.remat_save.v=host",
        "step.remat_save.residual=host"), "layout=fsdp_tp",
         "mesh.model=4"),
        _MAXTEXT, flags="--xla_tpu_scheduler_percent_shared_memory_limit=90",  # without, 5% too much memory
    ),
    Run(
        "16B, MaxText", "v5e:16x16", 120e12 / 100.6e9, 32000,
        _keys(_shape(4096, 32, 64, 28672, "model.head_dim=128"), 256, 2048, 6), _V5E,
        apart="tokens/s from 120 TFLOP/s a chip at 100.6 GFLOP a token, without a causal half",
    ),
    Run(
        "32B, MaxText", "v5p:4x4x4", 328e12 / 194.8e9, 32000,
        (*_keys(_shape(8192, 32, 64, 28672), 16, 2048, 28, "[q,k,v,gate,up,residual]"), "layout=fsdp_tp",
         "mesh.model=4"), _V5P, apart="tokens/s from 328 TFLOP/s a chip at 194.8 GFLOP a token, without a causal half",
    ),
)  # fmt: skip
