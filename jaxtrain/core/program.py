"""Everything compiled once for a run: mesh, model, optimizer, shardings, steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax

from jaxtrain.config.schema import Config, LossConfig
from jaxtrain.core import state as states
from jaxtrain.core.gradients import Gradients
from jaxtrain.core.step import eval_step, train_step, without_gradients
from jaxtrain.core.xla_options import in_place
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.models.definition import Definition, define, make_env
from jaxtrain.models.layout_check import check_placed
from jaxtrain.optim.optimizers import optimizer
from jaxtrain.optim.schedules import schedule
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.schedules.files import load
from jaxtrain.precision.policy import POLICIES
from jaxtrain.sharding.devices import make_mesh
from jaxtrain.sharding.layout import Layout, resolve
from jaxtrain.sharding.rules import BATCH, REPLICAS, STAGES
from jaxtrain.sharding.sharder import Sharder

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Program:
    """A run's compiled parts. `state` is abstract: shapes, dtypes and shardings of what `step` takes.

    `whole_step` is the step before it is jitted, which also returns its gradients, for whoever compares them.
    """

    config: Config
    layout: Layout
    sharder: Sharder
    definition: Definition
    state: State
    gradients: Gradients
    whole_step: Callable[[State, Any], tuple[State, dict[str, jax.Array], Any]]
    step: Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], dict[str, tuple[jax.Array, jax.Array]]]
    init: Callable[[], State]


def build(config: Config, vocab: int | None, devices: Sequence[Any]) -> Program:
    """The program of a config on these devices; nothing is allocated yet.

    Raises:
        UserError: the layout does not fit the devices or the model's tensors.
    """
    layout = resolve(config, len(devices))
    sharder = Sharder(make_mesh(layout, devices), layout.rules, config.zero)
    env = make_env(config, sharder)
    definition = define(config, env, vocab)
    check_layout(config, definition, len(devices))
    bias_rate = None if config.model.moe is None else config.model.moe.bias_update_rate
    rate, options = schedule(config.optimizer.lr, config.schedule, config.steps), config.optimizer
    tx = optimizer(options, rate, definition.names, definition.params, bias_rate)
    abstract = states.abstract(definition, tx, config)
    placed = states.shardings(abstract, definition, tx, sharder)
    accumulate, everywhere = config.step.microbatches, sharder.sharding(())
    local, own = local_definition(config, sharder, vocab), sharder.without(REPLICAS)
    gradients = Gradients(
        definition, sharder, accumulate, local,
        executor(config, sharder, definition, vocab), local and executor(config, own, local, vocab),
    )  # fmt: skip
    poisoned = tuple(sorted(fault.step for fault in config.debug.faults if fault.kind == "nan"))
    guarded = {"spike": config.guard.spike, "poisoned": poisoned}
    whole_step = precise(
        train_step(gradients, tx, rate, max_norm=options.grad_clip_norm, ema=options.ema_decay, **guarded), config
    )
    # Validation is the plain loss, to be compared with entropies and other runs: no smoothing, no z-loss.
    plain = config.model_copy(update={"loss": LossConfig(vocab_chunks=config.loss.vocab_chunks)})
    measured = define(plain, env, vocab)
    evaluate = eval_step(measured, sharder, accumulate, executor(plain, sharder, measured, vocab))
    return Program(
        config, layout, sharder, definition, states.with_shardings(abstract, placed), gradients,
        whole_step,
        step=jax.jit(without_gradients(whole_step), donate_argnums=0, out_shardings=(placed, everywhere),
                     compiler_options=in_place(devices[0].platform)),
        evaluate=jax.jit(precise(evaluate, config), out_shardings=everywhere),
        init=lambda: states.init(definition, tx, config, placed),
    )  # fmt: skip


def local_definition(config: Config, sharder: Sharder, vocab: int | None) -> Definition | None:
    """The model on one slice of the replicas, where these add up whole gradients by themselves (see `Gradients`)."""
    if config.zero > 1 or config.step.microbatches == 1 or REPLICAS not in sharder.axes(BATCH):
        return None
    if sharder.mesh is None or sharder.mesh.shape[REPLICAS] == 1:
        return None
    return define(config, make_env(config, sharder.without(REPLICAS)), vocab)


def executor(config: Config, sharder: Sharder, whole: Definition, vocab: int | None) -> Executor | None:
    """Returns the executor of the pipeline schedule; None without stages."""
    stages = 1 if sharder.mesh is None else sharder.mesh.shape[STAGES]
    if stages == 1:
        return None
    model = whole.bind(whole.params)
    for method in ("begin", "through", "finish"):
        if not hasattr(model, method):
            message = f"pipeline stages need its methods begin, through and finish, and it has no `{method}`"
            raise UserError(f"model.type {config.model.type}: {message}; expected mesh.pipeline 1, or these methods")
    period = getattr(model, "period", 1)
    if not isinstance(period, int) or period < 1:
        raise UserError(f"model.type {config.model.type}: its `period` is {period!r}; expected a number of layers")
    table = load(config.pipeline.schedule, stages, config.step.microbatches, config.pipeline.virtual_stages)
    inside = define(config, make_env(config, sharder.without(STAGES)), vocab)
    return Executor(table, sharder, whole, inside, period)


def precise(fn: Callable, config: Config) -> Callable:
    """`fn` with matmuls of the policy's precision: fp32 is not TF32 on a GPU, nor bfloat16 passes on a TPU."""

    @wraps(fn)
    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(POLICIES[config.precision].matmul):
            return fn(*args)

    return run


def check_layout(config: Config, definition: Definition, devices: int) -> None:
    """The mesh doctor on the model's real tensors: what a user's own model only shows once it is defined."""
    problems = check_placed(config, definition.tensors(), devices)
    if problems:
        raise ConfigError(problems)
