"""What XLA is told before it starts."""

import os

import pytest

from jaxtrain.core import xla_options


@pytest.mark.parametrize(
    ("jaxlib", "before", "after"),
    [
        ("0.10.2", "--a=1", "--a=1"),
        ("0.11.2", "--a=1", "--a=1 --xla_enable_hlo_sharding_v3=false"),
        ("0.11.0", "", "--xla_enable_hlo_sharding_v3=false"),
        ("0.11.2", "--xla_enable_hlo_sharding_v3=true", "--xla_enable_hlo_sharding_v3=true"),
        ("0.12.0", "", ""),
    ],
)
def test_the_option_is_there_where_xla_needs_it_and_knows_it(jaxlib, before, after, monkeypatch):
    monkeypatch.setattr(xla_options.metadata, "version", {"jaxlib": jaxlib}.get)
    monkeypatch.setenv("XLA_FLAGS", before)
    xla_options.prepare()
    assert os.environ["XLA_FLAGS"] == after
