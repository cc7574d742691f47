"""Typed config: every config key with its type, default and description, in one place.

`jaxtrain.load` creates a `Config` from YAML files, a layout and `key=value` overrides. Descriptions go into the JSON
Schema (`jaxtrain schema`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from jaxtrain.config.field_types import (
    Axes,
    AxisSize,
    Bool,
    Count,
    Devices,
    Fraction,
    NonNegative,
    PositiveFloat,
    PositiveInt,
    Share,
    Weights,
    ZeroStage,
    one_or_more,
)
from jaxtrain.config.section import Section, TextOrSection, key, section
from jaxtrain.config.sections.islands import IslandsConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.config.sections.sync import SyncConfig

OPTIMIZERS = ("adamw", "adafactor", "lion", "sgd", "muon")  # ours, which take the keys of their section
OBJECT = "object"  # name of what is given as a Python object
OPTIMIZER_KEYS = ("betas", "epsilon", "weight_decay", "decay_all_parameters")  # that no other optimizer reads
SCHEDULES = ("cosine", "linear", "wsd", "inverse_sqrt", "constant")
SCHEDULE_KEYS = ("warmup_steps", "min_lr_ratio", "decay_fraction")  # that no other schedule reads
TEXT_KEYS = ("sources", "tokenizer", "validation_fraction", "cache_dir", "workers")  # read by the text pipeline alone
LAYOUT_KEYS = ("mesh", "rules", "context_parallel", "zero", "pipeline")  # what a layout file holds


class MeshConfig(Section):
    """Sizes of the mesh axes, slowest network first. One of them may be -1, which is inferred."""

    replica: AxisSize = key(1, "replicas on the slowest network")
    pipeline: AxisSize = key(1, "pipeline stages")
    data: AxisSize = key(1, "data parallel; parameters replicated")
    fsdp: AxisSize = key(1, "data parallel; parameters sharded")
    expert: AxisSize = key(1, "expert parallel")
    context: AxisSize = key(1, "sequence shards (context parallel)")
    model: AxisSize = key(1, "tensor parallel, with sequence parallel")
    dcn: dict[str, PositiveInt] = key({}, "part of an axis that spans slices or nodes, e.g. {data: 2}")


class PipelineConfig(Section):
    """Order in which the stages of the mesh axis `pipeline` run the microbatches (`step.microbatches`) of a step."""

    schedule: str = key("1f1b_aligned", "name of a schedule (see `jaxtrain schedule`), or a .csv or .yaml table")
    virtual_stages: PositiveInt | None = key(None, "model chunks per stage; default: those of the schedule")


class DocumentsConfig(TextOrSection):
    """Documents on disk or in an object store; a plain string is the path."""

    path: str = key("stdlib", "`stdlib`, a file, a folder, a glob, a URL (s3://...), hf://OWNER/NAME[/CONFIG][:SPLIT]")
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "webdataset", "arrayrecord", "megatron"] = key(
        "auto", "how the files are read"
    )
    field: str = key("text", "column, or extension of a tar member (`txt`), with the text")
    include: tuple[str, ...] = key((), "text folders: file patterns, e.g. [*.py, *.md]; default: text-like files")


class SourceConfig(DocumentsConfig):
    """One source of documents in a mixture."""

    weight: Weights = key(
        {0: 1.0}, "weight in the mixture: a number, or numbers by first step, e.g. {0: 1.0, 1000: 0.5}"
    )


class DataConfig(Section):
    """Data: sources, tokenization, packing and order. Order is a pure function of (seed, step)."""

    type: str = key(
        "text", "`text`, a user's own data as `package.module:Class`, or a name that an installed package adds"
    )
    options: dict[str, Any] = key({}, "keyword arguments of a user's own data class")
    sources: Annotated[tuple[SourceConfig, ...], BeforeValidator(one_or_more)] = key(
        (SourceConfig(),), "documents; several make a mixture"
    )
    tokenizer: str = key("bytes", "`bytes`, or the path of a Hugging Face tokenizer.json")
    sequence: PositiveInt = key(1024, "tokens per sequence")
    global_batch: PositiveInt = key(8, "sequences per step, over all devices")
    validation_fraction: Share = key(0.01, "share of documents held out for validation, by hash of the name")
    cache_dir: str = key("~/.cache/jaxtrain", "folder of token caches")
    workers: PositiveInt | None = key(None, "processes that tokenize; default: the cores")

    @property
    def is_object(self) -> bool:
        """True if the data is an object that is given in Python."""
        return self.type == OBJECT

    @property
    def is_text(self) -> bool:
        """True if the data is the built-in text pipeline, not a user's class."""
        return self.type == "text"

    @model_serializer(mode="wrap")
    def _read_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the keys of the text pipeline for a user's class, which does not read them."""
        return {key: value for key, value in serialize(self).items() if self.is_text or key not in TEXT_KEYS}


class ParameterGroupConfig(Section):
    """Parameters with another learning rate or weight decay."""

    match: tuple[str, ...] = key((), "patterns of paths (`embed/.*`) or logical names (`vocab`)")
    lr_factor: NonNegative = key(1.0, "factor of the learning rate")
    weight_decay: NonNegative | None = key(None, "decoupled weight decay of our optimizers; default: theirs")


class OptimizerConfig(Section):
    """Optimizer."""

    name: str = key(
        "adamw", "`adamw`, `adafactor`, `lion`, `sgd`, `muon`, of optax as `optax.lamb` or `optax.contrib.prodigy`, or "
        "a function `package.module:name` that returns one, or a name that an installed package adds; `object`: given "
        "in Python"
    )  # fmt: skip
    options: dict[str, Any] = key({}, "keyword arguments of an optimizer of optax or a user's own")
    lr: NonNegative = key(3e-4, "peak learning rate; given as `learning_rate` to a function that takes it")
    betas: tuple[Share, Share] = key((0.9, 0.95), "decay of the first moment (momentum of sgd and muon) and the second")
    epsilon: PositiveFloat = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.1, "decoupled weight decay")
    decay_all_parameters: Bool = key(False, "decay norms, biases and embeddings too; default: matrices only")
    grad_clip_norm: PositiveFloat | None = key(1.0, "maximum global norm of the gradients")
    groups: tuple[ParameterGroupConfig, ...] = key(
        (), "parameters with another learning rate or decay; the first group that matches holds. `model.frozen` freezes"
    )
    ema_decay: Fraction | None = key(None, "decay of an exponential moving average of the weights")

    @property
    def is_object(self) -> bool:
        """True if the optimizer is an object that is given in Python."""
        return self.name == OBJECT

    @property
    def is_builtin(self) -> bool:
        """True if the optimizer is one of ours, not of optax or a user's own."""
        return self.name in OPTIMIZERS

    @model_serializer(mode="wrap")
    def _read_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the keys that only our optimizers read, for any other one."""
        return {key: value for key, value in serialize(self).items() if self.is_builtin or key not in OPTIMIZER_KEYS}


class ScheduleConfig(Section):
    """Learning rate by step, relative to `optimizer.lr`."""

    name: str = key(
        "cosine", "shape after warm-up: `cosine`, `linear`, `wsd`, `inverse_sqrt`, `constant`; or a schedule of optax "
        "as `optax.cosine_onecycle_schedule`, or a function `package.module:name` that returns one: then of all of it"
    )  # fmt: skip
    options: dict[str, Any] = key({}, "keyword arguments of a schedule of optax or a user's own")
    warmup_steps: Count = key(0, "steps of linear warm-up; at most the steps of the run")
    min_lr_ratio: Fraction = key(0.1, "last learning rate over the peak (cosine, linear, wsd)")
    decay_fraction: Fraction = key(0.2, "wsd: fraction of the steps spent decaying at the end")

    @property
    def is_builtin(self) -> bool:
        """True if the schedule is one of ours, not of optax or a user's own."""
        return self.name in SCHEDULES

    @model_serializer(mode="wrap")
    def _read_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the keys that only our schedules read, for any other one."""
        return {key: value for key, value in serialize(self).items() if self.is_builtin or key not in SCHEDULE_KEYS}


class LossConfig(TextOrSection):
    """The loss; a plain string is the function."""

    function: str | None = key(
        None,
        "cross_entropy, mse, bce, or `package.module:function` of (model, batch, key); default: the model's method",
    )
    inputs: str = key("inputs", "cross_entropy, mse, bce: the array of the batch that the model is called with")
    targets: str = key("targets", "cross_entropy, mse, bce: the array of the batch with the targets")
    z_loss: NonNegative = key(0.0, "weight of log(Z)^2")
    label_smoothing: Share = key(0.0, "probability mass spread over the vocabulary")
    vocab_chunks: PositiveInt = key(8, "vocabulary chunks of the loss; full logits never exist")


class StepConfig(Section):
    """Computation of one optimizer step."""

    microbatches: PositiveInt = key(1, "microbatches per step, whose gradients are accumulated")
    remat: Literal["none", "full", "dots"] = key(
        "none", "values recomputed in the backward pass; dots saves the outputs of matmuls"
    )
    remat_save: dict[str, Literal["device", "host"]] = key(
        {}, "with remat=full: values saved for the backward pass, and where, e.g. {q: device, input: host}"
    )
    remat_modules: tuple[str, ...] = key(
        (), "of a user's model: patterns of the paths of submodules that remat applies to; default: the whole model"
    )
    unroll: Count = key(1, "layers per iteration of the loop over layers; 0: all, no loop")
    attention: Literal["auto", "reference", "xla", "cudnn", "splash"] = key("auto", "attention kernel")

    @property
    def remat_policy(self) -> str | tuple[str, ...]:
        """`remat`, or the names of the values that stay on the device."""
        return tuple(name for name, where in self.remat_save.items() if where == "device") or self.remat

    @property
    def offloaded(self) -> tuple[str, ...]:
        """Names of the values offloaded to host memory until the backward pass."""
        return tuple(name for name, where in self.remat_save.items() if where == "host")

    @property
    def saved_values(self) -> str | tuple[str, ...]:
        """`remat`, or the names of all saved values, on the device and in host memory."""
        return tuple(self.remat_save) or self.remat


class CheckpointConfig(Section):
    """Asynchronous sharded checkpoints."""

    every: PositiveInt | None = key(None, "steps between checkpoints; default: only at the end and on signals")
    keep: PositiveInt = key(3, "number of newest checkpoints to keep")
    keep_best: Count = key(0, "number of best checkpoints to keep in addition")
    best_metric: str = key(
        "eval/loss", "metric of the newest validation that ranks checkpoints for `keep_best`, lower is better"
    )
    durable: str | None = key(None, "durable tier: folder or URL (s3://...) that receives checked copies as NAME/STEP")
    durable_every: PositiveInt | None = key(None, "steps between copies; default: every checkpoint")


class PluginConfig(TextOrSection):
    """A user's own object; a plain string is its type."""

    type: str = key("", "`package.module:Class`, or a name that an installed package adds")
    options: dict[str, Any] = key({}, "keyword arguments of the class")


class EvalConfig(Section):
    """Validation during training."""

    every: PositiveInt | None = key(None, "steps between validations; default: only at the end")
    batches: PositiveInt = key(8, "batches of each validation")
    sets: dict[str, DocumentsConfig] = key({}, "further validation sets by name")
    metrics: dict[str, str] = key(
        {}, "further metrics by name: functions `package.module:function` of (model, batch), of a mean or (sum, weight)"
    )


class LogConfig(Section):
    """Log files, trackers and console."""

    every: PositiveInt = key(1, "steps between logged steps")
    tensorboard: Bool = key(True, "write TensorBoard events")
    wandb: Bool = key(False, "log to Weights & Biases, project $WANDB_PROJECT or jaxtrain; needs jaxtrain[wandb]")
    mlflow: Bool = key(False, "log to MLflow, experiment $MLFLOW_EXPERIMENT_NAME or jaxtrain; needs jaxtrain[mlflow]")
    trackers: tuple[PluginConfig, ...] = key((), "users' own trackers, which receive metrics and events")
    upload_checkpoints: Bool = key(False, "upload every checkpoint to W&B and MLflow, as an artifact of the run")
    peak_tflops: PositiveFloat | None = key(None, "per-device peak for MFU; default: that of a known chip")
    sample_tokens: Count = key(0, "tokens generated at the end")


class SpikeConfig(Section):
    """Response to a spike of the loss or the gradient norm."""

    action: Literal["none", "skip", "rollback"] = key(
        "none", "skip: no update by that batch; rollback: restore an earlier checkpoint and skip batches"
    )
    threshold: Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)] = key(
        6.0, "robust z-score over the last steps above which a loss or gradient norm is a spike"
    )
    rollback_steps: Count = key(100, "minimum number of steps to go back (PaLM, arXiv 2204.02311, 5.1)")
    skip_batches: PositiveInt = key(200, "batches skipped after a rollback, around the spike")


class GuardConfig(Section):
    """Checks of the health of a run."""

    spike: SpikeConfig = section(SpikeConfig, "spikes of the loss or the gradient norm")
    replica_check_every: PositiveInt | None = key(
        None, "steps between checks for silent corruption, which compute a step twice and compare replicas"
    )


class FaultConfig(Section):
    """Injected fault, to test recovery."""

    kind: Literal["kill", "stop", "hang", "slow_disk", "full_disk", "corrupt", "nan", "flip"] = key(
        "kill", "kind of fault"
    )
    at: Literal["step", "save", "commit", "committed", "logged", "data", "eval"] | None = key(
        None, "moment within the step; default: the first possible one of the kind"
    )
    step: PositiveInt = key(1, "step of the fault")
    process: Count = key(0, "process of the fault")


class DebugConfig(Section):
    """Tests of the training system itself."""

    faults: tuple[FaultConfig, ...] = key((), "injected faults, e.g. [{kind: kill, at: save, step: 8}]")


class Config(Section):
    """One training run."""

    name: str = key("run", "name of the run", pattern=r"^\w[\w.\-]*$")
    dir: str = key("runs", "parent folder; the run writes to DIR/NAME")
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = key(0, "seed of initialisation, data order and dropout")
    steps: PositiveInt = key(1000, "optimizer steps")
    epochs: PositiveInt | None = key(None, "epochs, in place of `steps`, of data whose length is known")
    simulate: Devices | None = key(None, "run on this many simulated CPU devices")
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = key(
        "bf16", "dtype policy; bf16 and fp16 have float32 master weights, fp16 scales the loss"
    )
    layout: str = key("ddp", "name in configs/layouts, or path; sets the keys from `mesh` to `pipeline`")
    mesh: MeshConfig = section(MeshConfig, "sizes of the mesh axes; overrides those of the layout")
    rules: dict[str, Axes] = key(
        {},
        "logical name -> mesh axes, over those of the layout (`table`, an embedding's width: as vocab and embed); or "
        "a pattern of whole parameter paths, such as `decoder/.*/kernel` -> logical names of the dims",
    )
    context_parallel: Literal["auto", "gather", "ulysses", "ring"] = key(
        "auto",
        "how attention crosses sequence shards; auto: ulysses if they divide the heads of a device, else gather",
    )
    zero: ZeroStage = key(0, "ZeRO stage over `data`: 1 shards optimizer state, 2 also gradients, 3 also parameters")
    pipeline: PipelineConfig = section(PipelineConfig, "the schedule of pipeline stages")
    model: ModelConfig = section(ModelConfig, "the model")
    data: DataConfig = section(DataConfig, "the data")
    loss: LossConfig = section(LossConfig, "loss terms")
    optimizer: OptimizerConfig = section(OptimizerConfig, "the optimizer")
    schedule: ScheduleConfig = section(ScheduleConfig, "learning rate by step")
    step: StepConfig = section(StepConfig, "one step")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    eval: EvalConfig = section(EvalConfig, "validation")
    log: LogConfig = section(LogConfig, "logging")
    callbacks: tuple[PluginConfig, ...] = key((), "users' own callbacks, called between steps")
    guard: GuardConfig = section(GuardConfig, "checks of the run's health")
    sync: SyncConfig = section(SyncConfig, "when replicas agree")
    islands: IslandsConfig = section(IslandsConfig, "runs of their own that agree through a server")
    debug: DebugConfig = section(DebugConfig, "tests of the training system itself")

    @model_serializer(mode="wrap")
    def _read_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the steps that follow from `epochs`, which the data tells again, and `islands` if there are none."""
        omitted = {"steps": self.epochs is not None, "islands": not self.islands.has_islands}
        return {key: value for key, value in serialize(self).items() if not omitted.get(key, False)}

    @property
    def has_layout(self) -> bool:
        """True if the layout file is applied, as in a loaded config. `Config(layout=...)` in Python only names it."""
        return self.model_fields_set >= set(LAYOUT_KEYS)

    @property
    def axis_rules(self) -> dict[str, tuple[str, ...]]:
        """Rules from logical names to mesh axes. Replicas split the batch if no rule has their axis."""
        rules = {name: tuple(map(str, axes)) for name, axes in self.rules.items() if name.isidentifier()}
        if self.mesh.replica == 1 or any("replica" in axes for axes in rules.values()):
            return rules
        return {**rules, "batch": ("replica", *rules.get("batch", ()))}

    @property
    def names_by_path(self) -> dict[str, tuple[str | None, ...]]:
        """Rules from patterns of parameter paths to logical names: those whose key is no name."""
        return {pattern: names for pattern, names in self.rules.items() if not pattern.isidentifier()}

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(os.path.expanduser(self.dir)) / self.name
