"""Names of devices that are not there, and what is said where their compiler is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.errors import UserError
from jaxtrain.planning.hardware import chips, targets


@pytest.mark.parametrize(
    ("text", "shape", "platform"),
    [("h100:64x8", (64, 8), "cuda"), ("H200:8", (1, 8), "cuda"), ("h100", (1, 1), "cuda"),
     ("v5p:8x8x8", (8, 8, 8), "tpu"), ("v6e:16x16", (16, 16), "tpu"), ("cpu:8", (8,), "cpu"),
     ("v5p:16x16x24", (16, 16, 24), "tpu"), ("gb200:2x72", (2, 72), "cuda"), ("simulate:8", (8,), "cpu"),
     ("v5p:4x4x4*4", (4, 4, 4), "tpu"), ("v4:2x2x1", (2, 2, 1), "tpu"), ("v5p:4x4x12", (4, 4, 12), "tpu"),
     ("v6e:8x16", (8, 16), "tpu"), ("v5e:1x1", (1, 1), "tpu"), ("tpu7x:2x4x4", (2, 4, 4), "tpu"),
     ("local", (), "local")],
)  # fmt: skip
def test_targets(text: str, shape: tuple[int, ...], platform: str):
    target = targets.parse(text)
    assert (target.shape, target.platform) == (shape, platform)
    if text == "local":
        assert "JAX_PLATFORMS" not in targets.environment(target)
        return
    assert targets.environment(target)["JAX_PLATFORMS"] == "cpu"
    assert targets.parse(str(target)) == target


def test_devices_of_slices_and_of_chips_that_are_two_devices():
    assert targets.parse("v5p:4x4x4", slices=4) == targets.parse("v5p:4x4x4*4")
    assert targets.parse("v5p:4x4x4*4").devices == 256
    assert targets.parse("tpu7x:2x2x1").devices == 8
    assert targets.parse("h100:4x8").devices == 32
    assert targets.parse("local").devices is None


def test_a_stand_in_for_the_assembler_of_cuda(tmp_path):
    root = Path(targets.environment(targets.parse("h100"))["CUDA_ROOT"])
    assembler, kernel = str(root / "bin" / "ptxas"), tmp_path / "kernel"
    said = subprocess.run([assembler, "--version"], capture_output=True, text=True, check=True).stdout
    assert re.search(r", V13\.\d+\.\d+$", said.strip())
    subprocess.run([assembler, "in.ptx", "-o", str(kernel), "-arch=sm_90a"], check=True)
    assert kernel.exists()
    assert (root / "nvvm" / "libdevice" / "libdevice.10.bc").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", "target h10:8: no such device .did you mean `h100`"),
        ("h100:0x8", "expected a shape such as h100:NODESxGPUS"),
        ("h100:8x", "expected a shape"),
        ("v5p:8x8", "v5p has 3 sizes, not 2"),
        ("cpu:2x2", "cpu has 1 sizes, not 2"),
        ("v6e:2x2x2", "v6e has 2 sizes, not 3; expected e.g. v6e:4x4"),
        ("v6e:16x32", "512 chips; the largest slice of v6e has 256"),
        ("v5p:3x5x7", "no slice of v5p has this shape; expected sizes of 1, 2 or 4, or multiples of 4$"),
        ("v4:4x4x6", "no slice of v4 has this shape"),
        ("v6e:4x16", "no slice of v6e has this shape; expected 1x1, 2x2, .* 8x16 or 16x16$"),
        ("v5e:1x2", "no slice of v5e has this shape"),
        ("h100:1x16", "at most 8 GPUs; expected e.g. h100:2x8"),
        ("h100:2x8*2", "only TPUs have slices"),
        ("v5p:2x2x2*x", "expected a shape"),
        ("local:2", "local has no shape"),
        ("h100:", "expected a shape such as"),
        ("v5p:*2", "expected a shape such as"),
        ("simulat:2", "did you mean `simulate`"),
        ("gb20", "did you mean `gb200`"),
    ],
)
def test_wrong_targets_are_one_line(text: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        targets.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", chips.GPUS)
def test_the_compiler_takes_every_gpu(kind: str):
    if problem := targets.missing_packages(targets.parse(kind), "xla"):
        pytest.skip(problem)
    program = (
        "from jaxtrain.planning.hardware import targets; import jax, jax.numpy as jnp; from jax.sharding import *\n"
        f"devices = targets.devices('{kind}:2', attention='xla')\n"
        "mesh = jax.sharding.Mesh(devices, ('x',)); x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16,"
        " sharding=NamedSharding(mesh, PartitionSpec('x')))\n"
        "print(len(jax.jit(lambda x: jnp.exp(x @ x.T)).lower(x).compile().as_text()))"
    )
    env = os.environ | targets.environment(targets.parse(kind)) | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env, capture_output=True)


@pytest.mark.parametrize(("text", "extra"), [("h100:8", "plan-gpu"), ("v5p:2x2x2", "plan-tpu")])
def test_a_missing_compiler_is_one_line_that_names_the_extra(monkeypatch, text: str, extra: str):
    monkeypatch.setattr(targets, "installed_version", lambda package: "")
    with pytest.raises(UserError, match=rf"pip install 'jaxtrain\[{extra}\]'$"):
        targets.devices(text)
    assert targets.missing_packages(targets.parse("cpu:8")) is None


def test_another_libtpu_than_that_of_jax_is_refused(monkeypatch):
    versions = {"libtpu": "0.0.51", "jax": "0.10.2"}
    monkeypatch.setattr(targets, "installed_version", lambda package: "1")
    monkeypatch.setattr(targets.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(targets.metadata, "requires", lambda name: ["numpy>=2", 'libtpu==0.0.5.*; extra == "tpu"'])
    assert "libtpu 0.0.51 is not the one of jax 0.10.2, 0.0.5;" in str(
        targets.missing_packages(targets.parse("v4:2x2x1"))
    )
    versions["libtpu"] = "0.0.5.3"
    assert targets.missing_packages(targets.parse("v4:2x2x1")) is None
