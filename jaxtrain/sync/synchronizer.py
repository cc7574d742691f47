"""The state and the programs of a strategy: what the state of a run is, and what the host runs in a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.sharding.rules import REPLICA_AXIS
from jaxtrain.sync.added_state import placed_state, replicated
from jaxtrain.sync.local_step import SHARED, SYNC, Sending, split_state
from jaxtrain.sync.replica_dim import are_finite, average, choose, key_of_replica, shares, spread, stacked_sharding
from jaxtrain.sync.strategy import Replicas, Strategy, float32_bytes

State = dict[str, Any]
Metrics = dict[str, jax.Array]
Step = Callable[[State, Mapping[str, jax.Array]], tuple[State, Metrics]]
SENT = "exchanged_bytes"  # name of a metric
AGREED = ("params", "ema", "mutable")  # parts with a replica dim that evaluation needs


class RoundBytes(NamedTuple):
    """Bytes that a sender sends in `every` steps beside those of the steps.

    Attributes:
        total: all of them.
        most: in the step with most.
        during: those that travel while a step runs.
        sending: number of these steps.
    """

    total: float = 0
    most: float = 0
    during: float = 0
    sending: int = 0


class Synchronizer:
    """Replicas that are always equal: the state has no replica dim, and every step is the one program.

    Attributes:
        strategy: how replicas agree.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    @property
    def replicas(self) -> int | None:
        """Size of the replica dim of the state; None without one."""
        return None

    def abstract(self, one: State) -> State:
        """Returns shapes, dtypes and shardings of the state of a run, from those without a replica dim."""
        return one

    def start(self, one: State) -> State:
        """Returns the state of a run in which all replicas start from one state. Donates it."""
        return one

    def step_at(self, step: int, local: Step) -> Step:
        """Returns the programs of the step after `step` finished ones as one function; `local`: the train step."""
        return local

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use, without a replica dim."""
        return state

    def spread(self, tree: Any) -> Any:
        """Returns a part of a state without a replica dim as it is in the state of a run."""
        return tree

    def round_bytes(self) -> RoundBytes:
        """Returns what a replica sends in `every` steps; not in joint steps."""
        return RoundBytes()

    def with_checked_steps(self, check: Callable[[Any], Any]) -> Synchronizer:
        """Returns a synchronizer whose compiled steps beside the train step are wrapped by a check."""
        return self

    def end_round(self, state: State) -> State:
        """Returns the state after an exchange, if replicas have trained since the last one. Donates it."""
        return state

    def merge(self, state: State) -> State:
        """Returns a state without a replica dim, from which other replicas may start."""
        return state

    def sent_bytes(self, kind: Hashable) -> int:
        """Returns the bytes that a replica sends in an exchange of a kind, beside those of the step."""
        return 0


@dataclass(eq=False)
class GradientSynchronizer(Synchronizer):
    """Replicas that are equal and whose gradients a strategy combines: the state has a part `sync`.

    It has `own`, what the strategy adds. All else is as without the part.

    Attributes:
        strategy: combines the gradients.
        one: abstract state without the part, with shardings.
        make_step: (strategy of the first steps, abstract state) -> its compiled train step.
    """

    strategy: Strategy
    one: State
    make_step: Callable[[Strategy, State], Step]
    _steps: dict[Strategy, Step] = field(default_factory=dict)

    def abstract(self, one: State) -> State:
        """Returns shapes, dtypes and shardings of the state of a run, from those without the strategy's."""
        return {**one, SYNC: {"own": placed_state(self.strategy, one["params"])}}

    def start(self, one: State) -> State:
        """Returns the state of a run in which all replicas start from one state."""
        own = placed_state(self.strategy, one["params"])
        shardings = jax.tree.map(lambda leaf: leaf.sharding, own)
        return {**one, SYNC: {"own": jax.jit(self.strategy.init, out_shardings=shardings)(one["params"])}}

    def step_at(self, step: int, local: Step) -> Step:
        """Returns the train step, which gets the values of the host before it, and leaves those of the next step.

        So what reads the state between steps computes the gradients that the next step computes. First steps of another
        strategy have their own program.
        """
        strategy = self.strategy.at(step)
        if strategy is not self.strategy:
            if strategy not in self._steps:
                self._steps[strategy] = self.make_step(strategy, self.abstract(self.one))
            local = self._steps[strategy]
        before, after = self.strategy.host_values(step), self.strategy.host_values(step + 1)
        if not before:
            return local

        def run(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Metrics]:
            state, metrics = local(_with_values(state, before), batch)
            return _with_values(state, after), metrics

        return run

    def with_checked_steps(self, check: Callable[[Any], Any]) -> Synchronizer:
        """Returns a synchronizer whose programs of the first steps are wrapped by a check."""
        return replace(self, make_step=lambda strategy, state: check(self.make_step(strategy, state)), _steps={})

    def merge(self, state: State) -> State:
        """Returns the state without what the strategy adds."""
        return {name: tree for name, tree in state.items() if name != SYNC}

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use."""
        return self.merge(state)


@dataclass(eq=False)
class LooseSynchronizer(Synchronizer):
    """Replicas that may differ: all but `step` and `frozen` has a leading replica dim, and the state has a part `sync`.

    A single replica has no such dim, so that its step is the one of `bsp`, bit for bit. The part `sync` has `tokens`,
    those of each of several replicas since the last exchange, float32 [replicas]; and `own`, what the strategy adds.

    Attributes:
        strategy: how replicas agree.
        one: abstract state without a replica dim, with shardings.
        initial_moments: parameters -> state of the optimizer.
        make_joint: abstract state -> the compiled step of replicas that are equal.
        make_overlapped: (abstract state, what travels) -> the compiled step of replicas during which it does.
    """

    strategy: Strategy
    one: State
    initial_moments: Callable[[Any], Any]
    make_joint: Callable[[State], Step]
    make_overlapped: Callable[[State, Sending], Step]
    _exchanges: dict[Hashable, Step] = field(default_factory=dict)
    _overlapped: dict[Hashable, Step] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.strategy.replicas

    def abstract(self, one: State) -> State:
        """Returns shapes, dtypes and shardings of the state of a run, from those without a replica dim."""
        shared, own = split_state(one)
        if self.replicas > 1:
            own = jax.tree.map(partial(stacked_sharding, replicas=self.replicas, axis=REPLICA_AXIS), own)
        sync = {"tokens": self._vector, "own": placed_state(self.strategy, one["params"])}
        return {**shared, **own, SYNC: sync}

    @property
    def _vector(self) -> jax.ShapeDtypeStruct:
        """A number of each replica, on every device."""
        return replicated(jax.ShapeDtypeStruct((self.replicas,), jnp.float32), self.one["params"])

    @cached_property
    def _shardings(self) -> State:
        return jax.tree.map(lambda leaf: leaf.sharding, self.abstract(self.one))

    def start(self, one: State) -> State:
        """Returns the state of a run in which all replicas start from one state. Donates it.

        Replica 0 has the random key of that state, and the others keys that follow from it.
        """
        shardings = {name: self._shardings[name] for name in (*one, SYNC)}
        return jax.jit(self._started, out_shardings=shardings, donate_argnums=0)(one)

    def _started(self, one: State) -> State:
        shared, own = split_state(one)
        own = {name: self.spread(tree) for name, tree in own.items()}
        if "rng" in own and self.replicas > 1:
            own["rng"] = jax.vmap(key_of_replica)(own["rng"], jnp.arange(self.replicas))
        sync = {"tokens": jnp.zeros((self.replicas,), jnp.float32), "own": self.strategy.init(one["params"])}
        return {**shared, **own, SYNC: sync}

    def spread(self, tree: Any) -> Any:
        """Returns a part of a state without a replica dim as it is in the state of a run."""
        return spread(tree, self.replicas) if self.replicas > 1 else tree

    def _stacked(self, state: State) -> State:
        """Returns a state, or parts of it, with a replica dim also of a single replica."""
        shared, own = split_state(state)
        if self.replicas == 1:
            own = spread(own, 1)
        return {**shared, **own, **{name: state[name] for name in (SYNC,) if name in state}}

    def _as_stored(self, state: State) -> State:
        """Reverses `_stacked`."""
        shared, own = split_state(state)
        if self.replicas == 1:
            own = jax.tree.map(lambda x: x[0], own)
        return {**shared, **own, SYNC: state[SYNC]}

    def step_at(self, step: int, local: Step) -> Step:
        """Returns the programs of the step after `step` finished ones as one function; `local`: the train step."""
        plan = self.strategy.plan(step)
        run = local
        if self.replicas > 1 and (plan.is_joint or plan.send is not None):
            run = self._joint if plan.is_joint else self._overlapped_step(plan.send)
        if plan.exchange is None:
            return run
        exchange = self._exchange_program(plan.exchange)

        def run_and_exchange(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Metrics]:
            state, metrics = run(state, batch)
            state, more = exchange(state)
            if SENT in metrics and SENT in more:
                more[SENT] = more[SENT] + metrics[SENT]
            return state, metrics | more

        return run_and_exchange

    def with_checked_steps(self, check: Callable[[Any], Any]) -> Synchronizer:
        """Returns a synchronizer whose other steps are wrapped by a check."""
        return replace(
            self, make_joint=lambda state: check(self.make_joint(state)),
            make_overlapped=lambda state, sending: check(self.make_overlapped(state, sending)),
        )  # fmt: skip

    @cached_property
    def _joint(self) -> Step:
        return self.make_joint(self.abstract(self.one))

    def _overlapped_step(self, kind: Hashable) -> Step:
        """Returns the compiled step during which something of a kind travels."""
        if kind not in self._overlapped:
            send = partial(self.strategy.send, kind)
            self._overlapped[kind] = self.make_overlapped(self.abstract(self.one), Sending(send, self.sent_bytes(kind)))
        return self._overlapped[kind]

    def _exchange_program(self, kind: Hashable) -> Any:
        """Returns the compiled exchange of a kind: state -> (state, metrics); donates the state."""
        if kind not in self._exchanges:
            self._exchanges[kind] = jax.jit(
                partial(self.exchange, kind=kind),
                donate_argnums=0,
                out_shardings=(self._shardings, self._vector.sharding),
            )
        return self._exchanges[kind]

    def exchange(self, state: State, kind: Hashable = "all") -> tuple[State, Metrics]:
        """Returns the state after an exchange, and its metrics.

        A replica with numbers that are not finite in its parameters or mutable variables is left out. It continues with
        what the others agree on, and with initial values in place of moments that are not finite.
        """
        state = self._stacked(state)
        params, mutable, sync = state["params"], state.get("mutable"), state[SYNC]
        is_present = are_finite((params, mutable))
        weights = shares(sync["tokens"], is_present)
        replicas = Replicas(params, weights, sync["tokens"], is_present)
        own, new = self.strategy.exchange(sync["own"], replicas, kind)
        state = {**state, "params": new, SYNC: {"tokens": jnp.zeros_like(sync["tokens"]), "own": own}}
        if mutable is not None and self.strategy.exchanges_mutable(kind):
            state["mutable"] = _averaged_floats(mutable, weights)
        metrics, sent = {"left_out": 1.0 - is_present.astype(jnp.float32)}, self.sent_bytes(kind)
        if sent or self.replicas == 1:
            metrics[SENT] = jnp.float32(sent)
        return self._as_stored(self._healed(state, is_present)), metrics | self.strategy.metrics(replicas, new)

    def _healed(self, state: State, is_present: jax.Array) -> State:
        """Returns the state with what a replica that was left out lacks, for it to continue from its parameters."""

        def finite(tree: Any, initial: Any) -> Any:
            repaired = jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(x), x, y.astype(x.dtype)), tree, initial)
            return choose(is_present, tree, repaired)

        state = dict(state)
        state["opt_state"] = finite(state["opt_state"], jax.vmap(self.initial_moments)(state["params"]))
        if "ema" in state:
            state["ema"] = finite(state["ema"], state["params"])
        if "scaling" in state:
            largest = jax.tree.map(lambda x: jnp.max(jnp.where(is_present, x, jnp.zeros_like(x))), state["scaling"])
            healed = choose(is_present, state["scaling"], spread(largest, self.replicas))
            state["scaling"] = choose(jnp.broadcast_to(is_present.any(), is_present.shape), healed, state["scaling"])
        return state

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use, without a replica dim."""
        rest = {name: tree for name, tree in state.items() if name in SHARED}
        return rest | self._agreed_program({name: state[name] for name in (*AGREED, SYNC) if name in state})

    @cached_property
    def _agreed_program(self) -> Any:
        parts = {name: self.one[name] for name in AGREED if name in self.one}
        return jax.jit(self._agreed, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, parts))

    def _agreed(self, parts: State) -> State:
        parts = self._stacked(parts)
        params, mutable = parts["params"], parts.get("mutable")
        is_present = are_finite((params, mutable))
        weights = shares(parts[SYNC]["tokens"], is_present)
        result = {"params": self.strategy.agreed(parts[SYNC]["own"], Replicas(params, weights))}
        if mutable is not None:
            result["mutable"] = average(mutable, weights)
        if "ema" in parts:
            result["ema"] = average(parts["ema"], shares(parts[SYNC]["tokens"], is_present & are_finite(parts["ema"])))
        return result

    def end_round(self, state: State) -> State:
        """Returns the state after an exchange, if replicas have trained since the last one. Donates it."""
        step = int(jax.device_get(state["step"]))
        is_within = step > 0 and not self.strategy.is_settled(step)
        return self._exchange_program(self.strategy.early_exchange)(state)[0] if is_within else state

    def merge(self, state: State) -> State:
        """Returns a state without a replica dim, from which other replicas may start.

        Parameters and averages are those that evaluation uses, moments are averaged over the replicas, and the random
        key, the loss scale and the losses of the last steps are those of replica 0.
        """
        shardings = jax.tree.map(lambda leaf: leaf.sharding, {name: self.one[name] for name in state if name != SYNC})
        return jax.jit(self._merged, out_shardings=shardings)(state)

    def _merged(self, state: State) -> State:
        shared, own = split_state(self._stacked(state))
        first = {name: jax.tree.map(lambda x: x[0], own[name]) for name in ("rng", "scaling", "spikes") if name in own}
        moments = average(own["opt_state"], shares(state[SYNC]["tokens"], are_finite(own["opt_state"])))
        return {**shared, **first, "opt_state": moments, **self._agreed(state)}

    def sent_bytes(self, kind: Hashable) -> int:
        """Returns the bytes that a replica sends in an exchange of a kind, mutable variables included."""
        mutable = self.one.get("mutable", {}) if self.strategy.exchanges_mutable(kind) else {}
        ring = 2 * float32_bytes(mutable) * (self.replicas - 1) // self.replicas
        return self.strategy.sent_bytes(self.one["params"], kind) + ring

    def round_bytes(self) -> RoundBytes:
        """Returns what a replica sends in `every` steps; not in joint steps."""
        config = self.strategy.config
        first = config.bsp_steps if config.strategy == "post_local" else 0
        plans = [self.strategy.plan(step) for step in range(first, first + config.every)]
        during = [self.sent_bytes(plan.send) for plan in plans if plan.send is not None]
        after = [0 if plan.exchange is None else self.sent_bytes(plan.exchange) for plan in plans]
        steps = [
            size + (self.sent_bytes(plan.send) if plan.send is not None else 0) for size, plan in zip(after, plans)
        ]
        return RoundBytes(sum(steps), max(steps), sum(during), len(during))


def _with_values(state: State, values: Mapping[str, np.ndarray]) -> State:
    """Returns a state with other values of some replicated arrays that its strategy keeps."""
    own = dict(state[SYNC]["own"])
    for name, value in values.items():
        own[name] = _replicated_array(value, own[name].sharding)
    return {**state, SYNC: {**state[SYNC], "own": own}}


def _replicated_array(value: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """Returns an array that every device of a sharding holds."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    # device_put would compare the values of several processes by a collective
    copies = [jax.device_put(value, device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, copies)


def has_form(before: Synchronizer, after: Synchronizer, one: State) -> bool:
    """Returns whether a state of one synchronizer is one of another: the same arrays, with one meaning in a round."""
    if not after.strategy.continues(before.strategy):
        return False
    states = [each.abstract(one) for each in (before, after)]
    first, second = (jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in states)
    return first == second and before.strategy.round_form == after.strategy.round_form


def restart(before: Synchronizer, after: Synchronizer, state: State) -> State:
    """Returns the state of a run that continues with another strategy or other replicas. Donates it.

    A round that has begun is ended by an early exchange. All replicas continue from the parameters that those before
    agreed on. Moments, random keys, loss scales and moving averages stay those of each replica if their number is the
    same; else each starts from their averages. What a strategy adds begins anew.
    """
    state = before.end_round(state)
    started = after.start(before.merge(state))
    if after.replicas is None or after.replicas != before.replicas:
        return started
    return started | {name: state[name] for name in ("opt_state", "rng", "scaling", "spikes", "ema") if name in state}


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _averaged_floats(tree: Any, weights: jax.Array) -> Any:
    """Returns the average for all replicas if any is finite; integers stay those of each replica."""

    def one(x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return x
        return jnp.where(weights.sum() > 0, spread(average(x, weights), len(weights)), x)

    return jax.tree.map(one, tree)
