"""Anonymous memory of a process that loads a Hugging Face checkpoint, in addition to the shards.

    python benchmarks/import_memory.py [--layers 4] [--out import-memory.json]

The checkpoint has the shape of Llama 3 8B in bfloat16: safetensors files with valid headers and holes for data, which
read as zeros and take no disk. `64 devices`: all layers under fsdp 8 x model 8, eight processes of eight devices, of
which the first loads its part. `one device`: widths and vocabulary of 8B, fewer layers, on one device. `import`: the
same by the command, including the checkpoint that it writes. `besides` is the peak of RssAnon, minus its value before
loading, minus the bytes of the shards, which are anonymous memory too on CPU devices. Pages of the files do not count,
because the system can drop them at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

import common
import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
QUICK = {"vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14}
PARTS = ("one device", "import", "64 devices")
PROCESSES = 8
ALL_LAYERS = ("precision=bf16_pure", "layout=fsdp_tp", "mesh.model=8")
ONE = (
    "precision=bf16_pure",
    "layout=ddp",
)


def checkpoint(folder: Path, config: dict[str, Any], most: int) -> int:
    """Writes a checkpoint with holes for tensors. Returns the bytes of its largest tensor."""
    from jaxtrain.config.sections.model import ModelConfig
    from jaxtrain.interop import safetensors_io
    from jaxtrain.interop.config_json import from_hf_config
    from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
    from jaxtrain.interop.tensor_slices import parameter_slices, tensor_shapes
    from jaxtrain.models.decoder_params import decoder_tensors

    model = ModelConfig.model_validate(from_hf_config(config, "")[1])
    table = decoder_tensors(model, config["vocab_size"])
    shapes = tensor_shapes(
        parameter_slices(TENSOR_MAPPINGS["llama"], {path: shape for path, (shape, _) in table.items()})
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    files = safetensors_io.assign_files(shapes, BF16, most)
    for file, names in files.items():
        file_shapes = {name: shapes[name] for name in names}
        safetensors_io.write_file(folder / file, file_shapes, BF16, ())
        with (folder / file).open("r+b") as opened:
            opened.truncate(opened.seek(0, 2) + sum(prod(shape) for shape in file_shapes.values()) * BF16.itemsize)
    if len(files) > 1:
        index = {"weight_map": {name: file for file, names in files.items() for name in names}}
        (folder / safetensors_io.INDEX_FILE).write_text(json.dumps(index))
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) < 16 << 20, "no holes on this file system"
    return max(prod(shape) for shape in shapes.values()) * BF16.itemsize


class Peak:
    """Context manager that samples the peak of RssAnon of this process, in bytes."""

    def __enter__(self) -> Peak:
        self.begun = self.highest = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self.highest = max(self.highest, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return 1024 * int(line.split()[1])
        raise SystemExit("no RssAnon in /proc/self/status; this benchmark needs Linux")


def measure_load(spec: dict[str, Any]) -> dict[str, Any]:
    """Loads this process's part of a checkpoint."""
    import jax

    from jaxtrain.core.program import build_program
    from jaxtrain.core.resolve import resolve
    from jaxtrain.interop.config_json import read_model_config
    from jaxtrain.interop.load_weights import load_weights
    from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS

    if spec["processes"] > 1:
        jax.distributed.initialize(spec["coordinator"], spec["processes"], spec["process"])
    devices, folder = jax.devices(), Path(spec["folder"])
    family, section = read_model_config(folder)
    config = resolve(None, *spec["overrides"], base={"model": section}, paths=False)[0]
    params = build_program(config, section["vocab"], devices).state["params"]
    if spec["process"]:
        time.sleep(3600)  # until the parent ends it
    jax.numpy.zeros(()).block_until_ready()
    with Peak() as peak:
        begun = time.perf_counter()
        leaves = jax.tree.leaves(jax.block_until_ready(load_weights(folder, TENSOR_MAPPINGS[family.name], params)))
        seconds = time.perf_counter() - begun
    shards = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    whole = sum(leaf.nbytes for leaf in leaves)
    return {"devices": len(devices), "model": whole, "shards": shards, **_seen(peak, shards), "seconds": seconds}


def measure_import(spec: dict[str, Any]) -> dict[str, Any]:
    """Runs `jaxtrain import` in this process."""
    import jaxtrain
    from jaxtrain.checkpoint import CheckpointStore

    target = Path(spec["folder"]).with_name("run")
    with Peak() as peak:
        begun = time.perf_counter()
        jaxtrain.import_model(spec["folder"], target, *spec["overrides"])
        seconds = time.perf_counter() - begun
    tensors = CheckpointStore(target / "checkpoints").marker(0)["tensors"]
    shards = sum(prod(shape) for shape, _ in tensors.values()) * BF16.itemsize
    return {"devices": 1, "model": shards, "shards": shards, **_seen(peak, shards), "seconds": seconds}


def _seen(peak: Peak, shards: int) -> dict[str, Any]:
    return {"peak": peak.highest - peak.begun, "besides": peak.highest - peak.begun - shards}


def sixty_four(folder: Path) -> dict[str, Any]:
    """Measures the first of eight processes; the others only help to build the mesh."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    spec = {"folder": str(folder), "overrides": ALL_LAYERS, "processes": PROCESSES, "coordinator": coordinator}
    env = {"JAX_NUM_CPU_DEVICES": str(64 // PROCESSES), "JAX_PLATFORMS": "cpu"}
    others = [
        subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(spec | {"process": number, "part": "load"})],
            env=os.environ | env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for number in range(1, PROCESSES)
    ]  # fmt: skip
    try:
        return common.in_child(__file__, spec | {"process": 0, "part": "load"}, env, timeout=1500)
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="layers on one device")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        spec = json.loads(args.child)
        print(json.dumps((measure_load if spec["part"] == "load" else measure_import)(spec)), flush=True)
        os._exit(0)  # nothing waits for the other processes
    machine = common.machine("ml_dtypes")
    print(common.title(machine))
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        one = {"folder": f"{scratch}/few", "overrides": ONE, "processes": 1, "process": 0}
        few = LLAMA_8B | (QUICK if args.quick else {"num_hidden_layers": args.layers})
        largest = {"few": checkpoint(Path(scratch, "few"), few, 200_000_000 if args.quick else 5 * 10**9)}
        env = {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
        parts = {"one device": lambda: common.in_child(__file__, one | {"part": "load"}, env)}
        if not args.quick:
            largest["all"] = checkpoint(Path(scratch, "all"), LLAMA_8B, 5 * 10**9)
            parts["import"] = lambda: common.in_child(__file__, one | {"part": "import"}, env)
            parts["64 devices"] = lambda: sixty_four(Path(scratch, "all"))
        for name in [name for name in parts if name in args.parts]:
            result = parts[name]() | {"largest": largest["all" if name == "64 devices" else "few"]}
            rows.append({"part": name, **result})
            print(name, result, file=sys.stderr)
    shown = [
        {key: value / 1e9 if isinstance(value, int) and value > 10**6 else value for key, value in row.items()}
        for row in rows
    ]
    print(common.table(shown))
    common.report("import_memory", args, rows, machine, note="GB; model and shards in bfloat16")


if __name__ == "__main__":
    main()
