"""What XLA is told before it starts."""

import os

import jax
import pytest

from jaxtrain.core import xla_options


@pytest.mark.parametrize(
    ("jaxlib", "before", "after"),
    [
        ("0.10.2", "--a=1", "--a=1"),
        ("0.11.2", "--a=1", "--a=1 --xla_enable_hlo_sharding_v3=false"),
        ("0.11.0", "", "--xla_enable_hlo_sharding_v3=false"),
        ("0.11.2", "--xla_enable_hlo_sharding_v3=true", "--xla_enable_hlo_sharding_v3=true"),
        ("0.12.0.1", "", "--xla_enable_hlo_sharding_v3=false"),
    ],
)
def test_the_option_is_there_where_xla_needs_it_and_knows_it(jaxlib, before, after, monkeypatch):
    monkeypatch.setattr(xla_options.metadata, "version", {"jaxlib": jaxlib}.get)
    monkeypatch.setenv("XLA_FLAGS", before)
    xla_options.prepare()
    assert os.environ["XLA_FLAGS"] == after


def test_an_option_that_this_xla_does_not_name_is_not_set(monkeypatch):
    monkeypatch.setattr(xla_options.metadata, "version", {"jaxlib": "0.99.1"}.get)
    monkeypatch.setattr(xla_options, "UNNAMED", "--xla_no_such_option_at_all=false")
    monkeypatch.setenv("XLA_FLAGS", "--a=1")
    xla_options.prepare()
    assert os.environ["XLA_FLAGS"] == "--a=1"


def test_options_of_a_program_are_those_that_xla_takes():
    (name,) = options = xla_options.in_place("cpu")
    assert name == "xla_cpu_copy_insertion_use_region_analysis"
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
    assert xla_options.in_place("tpu") == {}
    assert not xla_options._is_known("xla_no_such_option_at_all")
