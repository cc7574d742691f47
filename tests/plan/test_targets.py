"""Names of devices that are not there, and what is said where their compiler is missing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jaxtrain.config.errors import UserError
from jaxtrain.plan import targets


@pytest.mark.parametrize(
    ("text", "shape", "platform"),
    [("h100:64x8", (64, 8), "cuda"), ("H200:8", (1, 8), "cuda"), ("h100", (1, 1), "cuda"),
     ("v5p:8x8x8", (8, 8, 8), "tpu"), ("v6e:16x16", (16, 16), "tpu"), ("cpu:8", (8,), "cpu")],
)  # fmt: skip
def test_targets(text: str, shape: tuple[int, ...], platform: str):
    target = targets.parse(text)
    assert (target.shape, target.platform) == (shape, platform)
    assert targets.environment(target)["JAX_PLATFORMS"] == "cpu"


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
    ],
)
def test_wrong_targets_are_one_line(text: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        targets.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "extra"), [("h100:8", "plan-gpu"), ("v5p:2x2x2", "plan-tpu")])
def test_a_missing_compiler_is_one_line_that_names_the_extra(monkeypatch, text: str, extra: str):
    monkeypatch.setattr(targets, "_installed", lambda module: False)
    with pytest.raises(UserError, match=rf"pip install 'jaxtrain\[{extra}\]'$"):
        targets.devices(text)
    assert targets.missing(targets.parse("cpu:8")) is None


def test_another_libtpu_than_that_of_jax_is_refused(monkeypatch):
    versions = {"libtpu": "0.0.51", "jax": "0.10.2"}
    monkeypatch.setattr(targets, "_installed", lambda module: True)
    monkeypatch.setattr(targets.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(targets.metadata, "requires", lambda name: ["numpy>=2", 'libtpu==0.0.5.*; extra == "tpu"'])
    assert "libtpu 0.0.51 is not the one of jax 0.10.2, 0.0.5;" in str(targets.missing(targets.parse("v4:2x2x1")))
    versions["libtpu"] = "0.0.5.3"
    assert targets.missing(targets.parse("v4:2x2x1")) is None
