"""Indexes of safetensors files that name other files, or tensors that are not there, are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxtrain.errors import ModelFileError
from jaxtrain.interop.safetensors_io import open_tensors


def write(folder: Path, weight_map: object) -> Path:
    model = folder / "model"
    model.mkdir()
    save_file({"a": np.ones(3, np.float32)}, model / "one.safetensors")
    save_file({"secret": np.ones(3, np.float32)}, folder / "outside.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return model


def test_a_good_index_is_read(tmp_path):
    assert list(open_tensors(write(tmp_path, {"a": "one.safetensors"}))) == ["a"]


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        ({"secret": "../outside.safetensors"}, "expected a weight_map of tensor names to files"),
        ({"a": "/etc/passwd"}, "expected a weight_map of tensor names to files"),
        ({"a": 3}, "expected a weight_map of tensor names to files"),
        ({"a": "two.safetensors"}, "no such file, but model.safetensors.index.json lists it"),
        (
            {"a": "one.safetensors", "b": "one.safetensors"},
            'has no `?"?b`?"?, which model.safetensors.index.json lists',
        ),
    ],
)
def test_a_bad_index_is_refused(tmp_path, weight_map, said):
    with pytest.raises(ModelFileError, match=said):
        open_tensors(write(tmp_path, weight_map))


def test_a_file_that_is_no_safetensors(tmp_path):
    model = write(tmp_path, {"a": "one.safetensors"})
    (model / "one.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelFileError, match="truncated, or not safetensors"):
        open_tensors(model)
