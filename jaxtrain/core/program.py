"""Everything that is compiled once for a run: mesh, model, optimizer, shardings, steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import jax
import optax

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.islands import IslandsConfig
from jaxtrain.config.sections.model import InitialWeightsConfig
from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.config.user_class import load_class
from jaxtrain.core import state as train_state
from jaxtrain.core.batch_spec import batch_spec
from jaxtrain.core.components import NO_COMPONENTS, Components
from jaxtrain.core.gradients import Gradients, ReplicaGradients
from jaxtrain.core.initial_weights import replace_weights
from jaxtrain.core.layout_check import check_tensors
from jaxtrain.core.step import (
    Metrics,
    TrainStep,
    TrainStepWithGradients,
    count_metrics,
    drop_gradients,
    eval_step,
    metrics_step,
    train_step,
)
from jaxtrain.core.xla_options import in_place, overlapped
from jaxtrain.errors import ConfigError, UserError
from jaxtrain.interop.array_weights import tree_weights
from jaxtrain.losses.row_independence import rows_are_proven_independent
from jaxtrain.losses.terms import Terms
from jaxtrain.models.model_def import NOTHING, ModelDef, define_model
from jaxtrain.models.protocols import HasStages
from jaxtrain.nn.env import Env
from jaxtrain.optim.any_optax import is_schedule_free
from jaxtrain.optim.optimizers import make_optimizer
from jaxtrain.optim.schedules import make_schedule
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.schedules.files import load_table
from jaxtrain.precision.policy import POLICIES
from jaxtrain.sharding.devices import make_mesh
from jaxtrain.sharding.layout import Layout, resolve_layout
from jaxtrain.sharding.rules import BATCH, DATA_AXIS, FSDP_AXIS, PIPELINE_AXIS, REPLICA_AXIS
from jaxtrain.sharding.sharder import Sharder
from jaxtrain.sharding.weight_gather import PLAIN, WeightGather
from jaxtrain.sync.compression.onebit_adam import Momenta
from jaxtrain.sync.island_state import island_form
from jaxtrain.sync.local_step import Sending, joint_step, local_step
from jaxtrain.sync.make import check_optimizer, make_strategy
from jaxtrain.sync.strategy import Strategy
from jaxtrain.sync.synchronizer import GradientSynchronizer, LooseSynchronizer, Synchronizer

State = train_state.State
DefineModel = Callable[[Config, Sharder], ModelDef]


@dataclass(frozen=True, eq=False)
class Program:
    """The compiled parts of a run.

    Attributes:
        config: the run's config.
        layout: resolved mesh sizes and rules.
        sharder: mesh and rules.
        model_def: the model as pure functions.
        state: abstract train state: shapes, dtypes and shardings of what `step` takes.
        one: the same without a replica dim, such as the state of one replica: what evaluation and export need.
        gradients: computes the gradients of a global batch, for equal replicas.
        step_with_gradients: the step before it is jitted, which also returns its gradients; that of all gradients in
            full where a strategy combines momenta.
        step: (state, batch) -> (state, metrics); donates the state.
        evaluate: (params, batch, other variables) -> (loss terms as (sum, weight), counts or None).
        eval_metrics: (params, batch, other variables) -> users' metrics as {name: (sum, weight)}.
        metrics: counts -> metrics of a step.
        components: Python objects in place of what the config names.
        init: () -> the state of step 0. Its argument may replace the model's variables first, see `core.state.init`.
        synchronizer: the programs that the host runs in a step, and the variables that replicas agree on.
        make_synchronizer: (section `sync`, number of replicas) -> the synchronizer of a state that a run has saved.
    """

    config: Config
    layout: Layout
    sharder: Sharder
    model_def: ModelDef
    state: State
    one: State
    gradients: Gradients
    step_with_gradients: TrainStepWithGradients
    step: TrainStep
    evaluate: Callable[..., tuple[Terms, Any]]
    eval_metrics: Callable[..., Terms]
    metrics: Callable[[Any], Metrics]
    components: Components
    init: Callable[..., State]
    synchronizer: Synchronizer
    make_synchronizer: Callable[[SyncConfig, int], Synchronizer]

    def step_at(self, step: int) -> TrainStep:
        """Returns what the host runs after `step` finished steps: the step, and an exchange if one is due."""
        return self.synchronizer.step_at(step, self.step)

    def saved_synchronizer(self, manifest: Mapping[str, Any]) -> Synchronizer:
        """Returns the synchronizer whose state a checkpoint holds, from its manifest."""
        saved = manifest.get("config", {})
        sync = SyncConfig(**saved.get("sync", {}))
        islands = IslandsConfig(**saved.get("islands", {}))
        if islands.has_islands:
            return island_form(make_strategy(SyncConfig(), 1), self.one, sync, islands.servers, self.model_def.names)
        sizes = manifest.get("mesh", {})
        return self.make_synchronizer(sync, sizes.get(sync.replica_axis(sizes), 1))

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use, without a replica dim."""
        return self.synchronizer.agreed(state)


def build_program(
    config: Config,
    vocab: int | None,
    devices: Sequence[Any],
    example: Mapping[str, Any] | None = None,
    components: Components = NO_COMPONENTS,
) -> Program:
    """Builds the program of a config on these devices. Allocates nothing yet.

    Args:
        config: a resolved config.
        vocab: vocabulary size of a model of tokens.
        devices: devices of the mesh, which need not be present.
        example: a batch of a user's own data, of any number of rows, for a module that is created from its inputs.
        components: Python objects in place of what the config names.

    Returns:
        the program; nothing is compiled before its first step.

    Raises:
        UserError: the layout does not fit the devices or the model's tensors.
    """
    layout = resolve_layout(config.layout, config.mesh, config.axis_rules, len(devices))
    sharder = _sharder(config, layout, devices)

    def define(config: Config, sharder: Sharder) -> ModelDef:
        return model_from_config(config, sharder, vocab, example, components.model, components.loss)

    model_def = define(config, sharder)
    _check_tensors(config, model_def, len(devices))
    tx, rate = _optimizer(config, model_def, components)
    parts = _state_parts(config)
    one = train_state.abstract(model_def, tx, parts)
    one = train_state.with_shardings(one, train_state.shardings(one, model_def, tx, sharder))
    gradients = _gradients(config, sharder, model_def, define, _microbatch_spec(config, example))
    joint = _step(config, gradients, tx, rate)
    joint_stacked = joint_step(joint, sharder)
    of_replicas = partial(_replicas_step, config, sharder, define, example, tx, rate)
    equal_step = partial(_equal_step, config, sharder, define, example, tx, rate, model_def, components, joint)
    compiled = lambda strategy, state: _compiled(equal_step(strategy), sharder, state)  # noqa: E731

    def make_synchronizer(sync: SyncConfig, replicas: int) -> Synchronizer:
        strategy = make_strategy(sync, replicas, sharder.mesh, model_def.names)
        if not strategy.parameters_differ:
            is_plain = not strategy.combines_gradients
            return Synchronizer(strategy) if is_plain else GradientSynchronizer(strategy, one, compiled)
        check_optimizer(strategy, is_schedule_free(one["opt_state"]))
        strategy.prepare(one["params"], model_def.names)
        return LooseSynchronizer(
            strategy, one, tx.init, lambda state: _compiled(joint_stacked, sharder, state),
            lambda state, sending: _compiled(of_replicas(sending), sharder, state, is_overlapped=True),
        )  # fmt: skip

    synchronizer = make_synchronizer(config.sync, layout.sizes[config.sync.replica_axis(layout.sizes)])
    strategy = synchronizer.strategy
    step = of_replicas() if (synchronizer.replicas or 1) > 1 else equal_step(strategy)
    state, shardings = synchronizer.abstract(one), jax.tree.map(lambda leaf: leaf.sharding, one)

    def init(replace: Callable[[State], State] | None = None) -> State:
        values = _of_instance(model_def, one, replace)
        return synchronizer.start(train_state.init(model_def, tx, parts, config.seed, shardings, values))

    return Program(
        config, layout, sharder, model_def, state, one, gradients, joint if strategy.combines_momenta else step,
        step=_compiled(step, sharder, state),
        evaluate=jax.jit(_evaluate(config, sharder, define), out_shardings=sharder.sharding(())),
        eval_metrics=_eval_metrics(config, sharder, model_def, components),
        metrics=jax.jit(partial(count_metrics, model_def)),
        components=components, init=init, synchronizer=synchronizer, make_synchronizer=make_synchronizer,
    )  # fmt: skip


def _state_parts(config: Config) -> train_state.StateParts:
    """Returns which parts the state has beside parameters and the optimizer's."""
    return train_state.StateParts(
        ema=config.optimizer.ema_decay is not None,
        scaling=POLICIES[config.precision].scales_loss,
        spikes=config.guard.spike.action != "none",
    )


def _step(config: Config, gradients: Gradients | ReplicaGradients, tx: Any, rate: Any) -> TrainStepWithGradients:
    """Returns the train step of a config with these gradients. Those of momenta are clipped before."""
    max_norm = config.optimizer.grad_clip_norm
    if isinstance(gradients, ReplicaGradients) and gradients.momenta is not None:
        max_norm = None
    nan_steps = tuple(sorted(fault.step for fault in config.debug.faults if fault.kind == "nan"))
    step = train_step(
        gradients, tx, rate, max_norm=max_norm, ema_decay=config.optimizer.ema_decay,
        spike=config.guard.spike, nan_steps=nan_steps,
    )  # fmt: skip
    return with_matmul_precision(step, config.precision)


def _equal_step(
    config: Config, sharder: Sharder, define: DefineModel, example: Mapping[str, Any] | None, tx: Any, rate: Any,
    model_def: ModelDef, components: Components, joint: TrainStepWithGradients, strategy: Strategy,
) -> TrainStepWithGradients:  # fmt: skip
    """Returns the train step of equal replicas: the joint one, or one with what a strategy combines in its place."""
    if not strategy.combines_gradients:
        return joint
    momenta, options = None, config.optimizer
    if strategy.combines_momenta:
        tx, rate = _optimizer(config, model_def, components, is_frozen=True)
        momenta = Momenta(options.betas[0], options.grad_clip_norm, model_def.names)
    apart = _replica_gradients(config, sharder, define, example, strategy.axis)
    return _step(config, ReplicaGradients(apart, model_def, sharder, strategy, momenta), tx, rate)


def _replicas_step(
    config: Config, sharder: Sharder, define: DefineModel, example: Mapping[str, Any] | None, tx: Any, rate: Any,
    sending: Sending | None = None,
) -> TrainStepWithGradients:  # fmt: skip
    """Returns the train step of all replicas, each on its rows, during which something may travel between them."""
    return local_step(_step(config, _replica_gradients(config, sharder, define, example), tx, rate), sharder, sending)


def _replica_gradients(
    config: Config, sharder: Sharder, define: DefineModel, example: Mapping[str, Any] | None,
    axis: str = REPLICA_AXIS,
) -> Gradients:  # fmt: skip
    """Returns the gradients of one replica, for code that is manual over the mesh axis of the replicas.

    Raises:
        UserError: gradients are compressed, and those of a replica's rows are no part of those of all rows.
    """
    replica = sharder.without_axis(axis)
    replicas = dict(sharder.mesh.shape)[axis] if sharder.mesh else 1
    rows = config.data.global_batch // replicas
    part = config.model_copy(update={"data": config.data.model_copy(update={"global_batch": rows})})
    replica_def, batch = define(part, replica), _microbatch_spec(part, example)
    if config.sync.is_compressed and not _rows_are_independent(config, replica_def, batch, 2):
        message = f"a row may change the loss of another one, so {config.sync.compress.gradients} cannot compress"
        expected = "expected sync.compress.gradients=none, or `rows_are_independent = True` on the model if none does"
        raise UserError(f"model.type {config.model.type}: {message} gradients of each replica's rows; {expected}")
    return _gradients(config, replica, replica_def, define, batch)


def _compiled(step: TrainStepWithGradients, sharder: Sharder, state: State, is_overlapped: bool = False) -> TrainStep:
    """Returns a step, compiled when it is first called, that donates its state and drops its gradients."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    platform = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform
    return jax.jit(
        drop_gradients(step), donate_argnums=0, out_shardings=(shardings, sharder.sharding(())),
        compiler_options=in_place(platform) | (overlapped(platform) if is_overlapped else {}),
    )  # fmt: skip


def _optimizer(
    config: Config, model_def: ModelDef, components: Components, is_frozen: bool = False
) -> tuple[optax.GradientTransformationExtraArgs, Callable[[Any], jax.Array] | None]:
    """Returns the optimizer, and the learning rate by step unless the optimizer has its own."""
    own = components.optimizer
    if own is None and config.optimizer.is_object:
        own = optax.identity()  # evaluating and generating need none
    rate = None if own else make_schedule(config.optimizer.lr, config.schedule, config.steps)
    bias_rate = None if config.model.moe is None else config.model.moe.bias_update_rate
    return make_optimizer(config.optimizer, rate, model_def.names, model_def.params, bias_rate, own, is_frozen), rate


def model_from_config(
    config: Config, sharder: Sharder, vocab: int | None, example: Mapping[str, Any] | None = None,
    component: Any = None, loss: Any = None,
) -> ModelDef:  # fmt: skip
    """Defines the model of a config on a mesh. See `build_program` and `models.model_def.define_model`."""
    step = config.step
    env = Env(
        sharder, POLICIES[config.precision], step.attention, config.context_parallel, step.remat_policy, step.offloaded,
        step.unroll, step.remat_modules,
    )  # fmt: skip
    batch = _microbatch_spec(config, example)
    return define_model(config.model, config.loss, env, vocab, config.names_by_path, batch, component, loss)


def _microbatch_spec(config: Config, example: Mapping[str, Any] | None) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Returns shapes and dtypes of a microbatch; None for a user's data without an example."""
    rows = config.data.global_batch // config.step.microbatches
    return batch_spec(config.data, rows, example) if example is not None or config.data.is_text else None


def _of_instance(
    model_def: ModelDef, abstract: State, replace: Callable[[State], State] | None
) -> Callable[[State], State] | None:
    """Returns `replace` after the values of the instance that defined the model, if there is one."""
    if model_def.instance is None:
        return replace
    stored = tree_weights(model_def.instance, "model")

    def from_instance(variables: State) -> State:
        variables = replace_weights(variables, abstract, stored, InitialWeightsConfig())[0]
        return variables if replace is None else replace(variables)

    return from_instance


def _gradients(
    config: Config, sharder: Sharder, model_def: ModelDef, define: DefineModel, batch: Mapping[str, Any] | None
) -> Gradients:
    microbatches, executor = config.step.microbatches, _executor(config, sharder, model_def, define)
    at_once = Gradients(model_def, sharder, microbatches, pipeline=executor)
    replicas = _accumulating_replicas(config, sharder)
    if jax.tree.leaves(model_def.non_trainable) or replicas == 1:
        return at_once
    replica = sharder.without_axis(DATA_AXIS)
    replica_def = define(config, replica)
    if not _rows_are_independent(config, replica_def, batch, replicas):
        return at_once
    replica_executor = _executor(config, replica, replica_def, define)
    return Gradients(model_def, sharder, microbatches, replica_def, executor, replica_executor)


def _rows_are_independent(config: Config, part_def: ModelDef, batch: Mapping[str, Any] | None, parts: int) -> bool:
    """Returns whether the loss of a microbatch is declared or proven to be the sum of those of parts of its rows."""
    if part_def.rows_are_independent:
        return True
    if batch is None or jax.tree.leaves(part_def.non_trainable) or config.mesh.pipeline != 1:
        return False
    # Of one row a program is another one: its dims of size 1 are broadcast and squeezed.
    rows = max(2, len(next(iter(batch.values()))) // parts)
    part = {name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}

    def loss(params: Any, batch: Mapping[str, Any], key: jax.Array) -> tuple[Terms, Any]:
        return part_def.loss(params, NOTHING, batch, key)[:2]

    return rows_are_proven_independent(loss, part_def.params, part, parts)


def _accumulating_replicas(config: Config, sharder: Sharder) -> int:
    """Returns the number of replicas that accumulate unsharded gradients, to be reduced after the last microbatch."""
    if sharder.mesh is None or DATA_AXIS not in sharder.axes(BATCH):
        return 1
    return sharder.mesh.shape[DATA_AXIS] if config.zero <= 1 and config.step.microbatches > 1 else 1


def _evaluate(config: Config, sharder: Sharder, define: DefineModel) -> Callable[..., tuple[Terms, Any]]:
    """Returns the evaluation step of the plain loss, without smoothing and z-loss, so that runs can be compared."""
    plain = config.model_copy(update={"loss": config.loss.model_copy(update={"z_loss": 0.0, "label_smoothing": 0.0})})
    model_def = define(plain, sharder)
    executor = _executor(plain, sharder, model_def, define)
    return with_matmul_precision(eval_step(model_def, sharder, config.step.microbatches, executor), config.precision)


def _eval_metrics(
    config: Config, sharder: Sharder, model_def: ModelDef, components: Components
) -> Callable[..., Terms]:
    """Returns the compiled users' metrics; without any a function that returns none."""
    named = {name: load_class(path, f"eval.metrics.{name}") for name, path in config.eval.metrics.items()}
    functions = named | dict(components.metrics or {})
    if not functions:
        return lambda *_: {}
    step = metrics_step(model_def, sharder, config.step.microbatches, functions)
    return jax.jit(with_matmul_precision(step, config.precision), out_shardings=sharder.sharding(()))


def _executor(config: Config, sharder: Sharder, model_def: ModelDef, define: DefineModel) -> Executor | None:
    """Returns the executor of the pipeline schedule; None without stages.

    Raises:
        UserError: the model has no stages.
    """
    stages = 1 if sharder.mesh is None else sharder.mesh.shape[PIPELINE_AXIS]
    if stages == 1:
        return None
    if jax.tree.leaves(model_def.non_trainable):
        message = "pipeline stages hold trained parameters only, and the model has frozen or mutable variables"
        raise UserError(f"model.type {config.model.type}: {message}; expected mesh.pipeline 1")
    model = model_def.abstract()
    if not isinstance(model, HasStages):
        missing = next(name for name in ("embed_inputs", "run_layers", "head_loss") if not hasattr(model, name))
        message = f"pipeline stages need the methods embed_inputs, run_layers and head_loss, and it has no `{missing}`"
        raise UserError(f"model.type {config.model.type}: {message}; expected mesh.pipeline 1, or these methods")
    group = getattr(model, "layers_per_group", 1)
    if not isinstance(group, int) or group < 1:
        message = f"`layers_per_group` is {group!r}; expected a number of layers"
        raise UserError(f"model.type {config.model.type}: {message}")
    table = load_table(config.pipeline.schedule, stages, config.step.microbatches, config.pipeline.virtual_stages)
    stage_def = define(config, sharder.without_axis(PIPELINE_AXIS))
    return Executor(table, sharder, model_def, stage_def, group)


def _sharder(config: Config, layout: Layout, devices: Sequence[Any]) -> Sharder:
    """Returns mesh and rules. Raises UserError if the copies of weights in a node do not divide their shards."""
    compress, shards, gather = config.sync.compress, layout.sizes[FSDP_AXIS], PLAIN
    if config.sync.changes_gathers:
        if compress.secondary and shards % compress.secondary:
            message = f"{compress.secondary} devices of a node do not divide mesh.fsdp {shards}"
            raise UserError(f"sync.compress.secondary: {message}; expected a divisor of it")
        gather = WeightGather(compress.weights != "none", compress.secondary)
    return Sharder(make_mesh(layout, devices), layout.rules, config.zero, weight_gather=gather)


def _check_stack(config: Config, model_def: ModelDef) -> None:
    """Raises UserError if weights of layers are to travel otherwise and the model has no stack of layers."""
    if config.sync.changes_gathers and not isinstance(model_def.abstract(), HasStages):
        name = "weights" if config.sync.compress.weights != "none" else "secondary"
        message = f"{name} needs stacked layers with the methods embed_inputs, run_layers and head_loss"
        raise UserError(f"sync.compress.{name}: {message}, and {config.model.type} has none; expected the default")


def with_matmul_precision(fn: Callable, precision: str) -> Callable:
    """Returns `fn` with matmuls in the policy's precision: fp32 is neither TF32 on GPUs nor bfloat16 passes on TPUs."""

    @wraps(fn)
    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(POLICIES[precision].matmul):
            return fn(*args)

    return run


def _check_tensors(config: Config, model_def: ModelDef, devices: int) -> None:
    """Checks the layout on the model's own tensors, which for a user's model are known only now."""
    _check_stack(config, model_def)
    problems = check_tensors(config, model_def.tensors(), devices)
    if problems:
        raise ConfigError(problems)
