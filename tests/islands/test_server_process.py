"""A server's state in a file: of every dtype, and refused if it is of other tensors."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.sections.sync import OuterConfig, SyncConfig
from jaxtrain.islands.partition import Spec
from jaxtrain.islands.server.delayed_nesterov import DelayedNesterovRule
from jaxtrain.islands.server.process import ServerProcess
from jaxtrain.islands.server.rules import ExchangeRule, Header, Rule

SPECS = {
    ("params", "w"): Spec((4, 2), jnp.float32, ("embed", "mlp")),
    ("params", "scale"): Spec((3,), jnp.bfloat16, ("embed",)),
    ("mutable", "mean"): Spec((2,), jnp.float32),
}
RULE = ExchangeRule(SyncConfig(strategy="diloco"))


def values(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {path: rng.normal(size=spec.shape).astype(spec.dtype) for path, spec in SPECS.items()}


@pytest.mark.parametrize("rule", [RULE, DelayedNesterovRule(OuterConfig())], ids=["diloco", "async_diloco"])
def test_a_state_that_was_saved_goes_on_as_the_one_that_was_not(tmp_path: Path, rule: Rule) -> None:
    server, file = ServerProcess(rule, SPECS), str(tmp_path / "state.npz")
    header = Header((0, 1), (3.0, 5.0), (1.0, 1.0), 0, 1.0, (True, True))
    state, *_ = server.begin(values(0))
    state, *_ = server.update(state, header, values(1), values(2))
    server.save(state, file)
    loaded, given, message, sizes = ServerProcess(rule, SPECS).load(file)
    assert sizes == (4 * 8 + 2 * 3 + 4 * 2, 0)
    assert not message
    after, again = (ServerProcess(rule, SPECS).update(each, header, values(3), values(4)) for each in (state, loaded))
    for path, spec in SPECS.items():
        assert given[path].dtype == spec.dtype
        np.testing.assert_array_equal(after[1][path], again[1][path])
    mean = (3 * values(3)["mutable", "mean"] + 5 * values(4)["mutable", "mean"]) / 8
    np.testing.assert_allclose(after[1]["mutable", "mean"], mean, rtol=1e-6)


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco"])
def test_the_weight_that_late_work_lacks_stays_with_what_the_server_has(strategy: str) -> None:
    """A push of equal values changes nothing, whatever its weight; one of others moves by it."""
    outer = OuterConfig(lr=1.0, momentum=0.0)
    server = ServerProcess(ExchangeRule(SyncConfig(strategy=strategy, outer=outer)), SPECS)
    before, own, late = values(0), values(1), values(2)
    header = Header((0, 1), (1.0, 3.0), (1.0, 0.5), 0, 1.0, (True, True))
    start, *_ = server.begin(before)
    same = server.update(start, header, before, before)[1]
    found = server.update(start, header, own, late)[1]
    for path, x in before.items():
        rtol = 0.02 if SPECS[path].dtype == jnp.bfloat16 else 1e-6
        x, y, z = (np.asarray(each[path], np.float32) for each in (before, own, late))
        np.testing.assert_allclose(np.asarray(same[path], np.float32), x, rtol=rtol)
        expected = y / 4 + 3 / 8 * z + 3 / 8 * x
        np.testing.assert_allclose(np.asarray(found[path], np.float32), expected, rtol=rtol, atol=rtol)


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    server, file = ServerProcess(RULE, SPECS), str(tmp_path / "state.npz")
    server.save(server.begin(values(0))[0], file)
    fewer = {path: spec for path, spec in SPECS.items() if path[0] == "params"}
    with pytest.raises(ValueError, match="arrays; expected"):
        ServerProcess(RULE, fewer).load(file)
