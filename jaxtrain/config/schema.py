"""The typed config: every key, its type, its default and what it means, in one place.

No JAX is imported here. A `Config` is frozen and fully resolved; `jaxtrain.load` makes one from
YAML files, a layout and `key=value` overrides. Descriptions feed `jaxtrain schema` (JSON Schema).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticKnownError

USER_CLASS = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"  # "package.module:Class"

LAYOUT_KEYS = ("mesh", "rules", "context", "zero", "pipeline")  # what a layout file holds
LARGEST = 2**31 - 1  # sizes and steps are int32 on the device
Bool = Annotated[bool, Field(strict=True)]


def _whole(value: Any) -> Any:
    """A whole number may be written 1e6."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST else value


PositiveInt = Annotated[int, Field(ge=1, le=LARGEST, strict=True), BeforeValidator(_whole)]
Devices = Annotated[int, Field(ge=1, le=4096, strict=True)]
Count = Annotated[int, Field(ge=0, le=LARGEST, strict=True), BeforeValidator(_whole)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]
Share = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


def _no_lookalike(value: Any) -> Any:
    """`Literal` takes whatever is equal: true and 1.0 for 1."""
    if isinstance(value, (bool, float)):
        raise PydanticKnownError("int_type")
    return value


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_lookalike)]


def _axis_size(value: int) -> int:
    if value == 0:
        raise ValueError("0 is no size; expected a positive number, or -1 for what is left")
    return value


AxisSize = Annotated[
    int,
    Field(ge=-1, le=LARGEST, strict=True),
    AfterValidator(_axis_size),
    WithJsonSchema({"anyOf": [{"enum": [-1]}, {"type": "integer", "minimum": 1, "maximum": LARGEST}]}),
]


def _axes(value: Any) -> Any:
    """A rule may be written `null`, `fsdp` or `[data, fsdp]`; it is kept as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


Axes = Annotated[
    tuple[str, ...],
    BeforeValidator(_axes),
    WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}, {"type": "null"}]}),
]


def key(default: Any, description: str, **kwargs: Any) -> Any:
    """A config field with its default and its one-line description."""
    return Field(default=default, description=description, **kwargs)


def section(cls: type[BaseModel], description: str) -> Any:
    """A nested section that defaults to its own defaults."""
    return Field(default_factory=cls, description=description)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused. `from_` is Python's way to say `from`; files say `from`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, protected_namespaces=(), serialize_by_alias=True
    )


class Mesh(Section):
    """Sizes of the mesh axes, slowest network first. One of them may be -1: it takes what is left."""

    replica: AxisSize = key(1, "islands that may synchronise loosely")
    pipeline: AxisSize = key(1, "pipeline stages")
    data: AxisSize = key(1, "data parallel; parameters replicated")
    fsdp: AxisSize = key(1, "data parallel; parameters sharded")
    expert: AxisSize = key(1, "expert parallel")
    context: AxisSize = key(1, "sequence shards (context parallel)")
    model: AxisSize = key(1, "tensor parallel; sequence parallel rides on it")
    dcn: dict[str, PositiveInt] = key({}, "part of an axis that spans slices or nodes, e.g. {data: 2}")


class Pipeline(Section):
    """How the stages of the mesh axis `pipeline` share out the microbatches (`step.accumulate`) of a step."""

    schedule: str = key("1f1b_aligned", "name of a schedule (see `jaxtrain schedule`), or a .csv or .yaml table")
    chunks: PositiveInt | None = key(None, "parts of the model a stage holds; default: the schedule's")
    timing: bool = key(
        True, "time the stages' actions after the first step, for the bubble in the log; compiles once more"
    )


class RopeScaling(Section):
    """Frequency scaling of the rotary embedding, with the field names of Hugging Face configs; or what stands in for
    it: a learned embedding of each position."""

    type: Literal["linear", "llama3", "learned"] = key(
        "linear", "kind of scaling; learned: no rotary embedding, a table of `original_length` positions (GPT-2)"
    )
    factor: PositiveFloat = key(1.0, "context length multiplier")
    low_freq_factor: PositiveFloat = key(1.0, "llama3: below this no scaling is undone")
    high_freq_factor: PositiveFloat = key(4.0, "llama3: above this frequencies are kept")
    original_length: PositiveInt = key(8192, "llama3: sequence length before scaling; learned: the longest there is")


class Moe(Section):
    """Mixture of experts: in every layer each token is sent to its `top_k` best of `experts` feed-forward layers."""

    experts: PositiveInt = key(8, "feed-forward layers to choose from")
    top_k: PositiveInt = key(2, "experts of each token; 1 is Switch")
    mlp: PositiveInt | None = key(None, "width of one expert; default: model.mlp")
    shared: Count = key(0, "experts that every token visits besides: one layer of so many times the width")
    capacity: PositiveFloat | None = key(None, "places per expert over an even share of a sequence; null: none dropped")
    normalize: Bool | None = key(None, "a token's gates sum to one (Mixtral); default: where top_k is above 1")
    bias_rate: PositiveFloat | None = key(None, "step of a selection bias that evens the load without a loss")


class Model(Section):
    """The model. Sizes carry the logical names of the dims they set."""

    type: str = key("decoder", "`decoder`, or a user's own model as `package.module:Class`")
    options: dict[str, Any] = key({}, "keyword arguments of a user's own model")
    from_: str | None = key(
        None, "Hugging Face folder: training starts from its weights; gives the keys below too", alias="from"
    )
    vocab: PositiveInt | None = key(None, "vocabulary size; default: the tokenizer's, rounded up to 128")
    embed: PositiveInt = key(256, "width of the residual stream")
    layers: PositiveInt = key(4, "number of blocks")
    heads: PositiveInt = key(4, "query heads")
    kv_heads: PositiveInt | None = key(None, "key/value heads (GQA); default: heads")
    head_dim: PositiveInt | None = key(None, "size of a head; default: embed / heads")
    mlp: PositiveInt = key(1024, "width of the feed-forward layer")
    moe: Moe | None = key(None, "mixture of experts in place of the feed-forward layer")
    activation: Literal["swiglu", "geglu", "gelu"] = key("swiglu", "feed-forward activation; *glu are gated")
    attention_bias: Bool = key(False, "biases on the q, k, v projections")
    output_bias: Bool = key(False, "bias on the attention output projection")
    mlp_bias: Bool = key(False, "biases in the feed-forward layer")
    qk_norm: Bool | Literal["whole"] = key(False, "a norm on each query and key head; whole: over all of them (OLMo 2)")
    norm_epsilon: PositiveFloat = key(1e-6, "epsilon of the norms")
    norm_offset: Bool | Literal["layer"] = key(
        False, "norm scale is 1 + weight (Gemma); layer: LayerNorm, which takes the mean off and adds a bias (GPT-2)"
    )
    post_norm: Bool | Literal["only"] = key(
        False, "a second norm after attention and feed-forward (Gemma 2); only: and none before (OLMo 2)"
    )
    embed_scale: Bool | PositiveFloat = key(False, "embeddings times this; true: sqrt(embed) (Gemma)")
    residual_scale: PositiveFloat = key(1.0, "what attention and feed-forward add, times this (Granite)")
    logits_divisor: PositiveFloat = key(1.0, "output logits over this (Granite)")
    tie_embeddings: Bool = key(False, "the head is the embedding table")
    rope_theta: PositiveFloat = key(10_000.0, "base of the rotary frequencies")
    rope_scaling: RopeScaling | None = key(None, "rotary frequency scaling for long contexts, or learned positions")
    window: PositiveInt | None = key(None, "sliding attention window in tokens")
    window_every: PositiveInt = key(1, "1: every layer has the window; n: every n-th layer attends globally")
    window_theta: PositiveFloat | None = key(
        None, "rotary base of layers with the window, never scaled (Gemma 3); default: as all layers"
    )
    attention_scale: PositiveFloat | None = key(None, "softmax scale; default: head_dim ** -0.5")
    attention_softcap: PositiveFloat | None = key(None, "tanh cap of attention scores")
    logits_softcap: PositiveFloat | None = key(None, "tanh cap of the output logits")
    init_std: PositiveFloat = key(0.02, "standard deviation of weight initialisation")

    @property
    def positions(self) -> int | None:
        """Positions that have a learned embedding; None with a rotary one, which has no bound."""
        scaling = self.rope_scaling
        return scaling.original_length if scaling is not None and scaling.type == "learned" else None


class Documents(Section):
    """Where documents are."""

    path: str = key("stdlib", "`stdlib`, a file, a folder, a glob, a URL (s3://...), hf://OWNER/NAME[/CONFIG][:SPLIT]")
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "webdataset", "arrayrecord", "megatron"] = key(
        "auto", "how the files are read"
    )
    field: str = key("text", "what holds the text: a column; a tar's member (`txt`)")
    include: tuple[str, ...] = key((), "text folders: file patterns, e.g. [*.py, *.md]; default: text-like files")


class Source(Documents):
    """One source of documents in a mixture."""

    weight: PositiveFloat | dict[int, NonNegative] = key(
        1.0, "share in the mixture; or from which step on it is what, e.g. {0: 1.0, 1000: 0.5}"
    )

    @property
    def shares(self) -> dict[int, float]:
        """Step -> share from it on; that of step 0 is always there, 1 where it is not given."""
        return {0: 1.0, **self.weight} if isinstance(self.weight, dict) else {0: self.weight}


class Data(Section):
    """What is read, how it is tokenized, packed and ordered. Order is a pure function of (seed, step)."""

    type: str = key("text", "`text`, or a user's own data as `package.module:Class`")
    options: dict[str, Any] = key({}, "keyword arguments of a user's own data class")
    sources: tuple[Source, ...] = key((Source(),), "documents; several make a mixture")
    tokenizer: str = key("bytes", "`bytes`, or the path of a Hugging Face tokenizer.json")
    sequence: PositiveInt = key(1024, "tokens per sequence")
    global_batch: PositiveInt = key(8, "sequences per step, over all devices")
    validation: Share = key(0.01, "share of documents kept for validation, by hash of the name")
    cache: str = key("~/.cache/jaxtrain", "folder of token caches")
    workers: PositiveInt | None = key(None, "processes that tokenize; default: the cores")


class Optimizer(Section):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adafactor", "lion", "sgd", "muon"] = key("adamw", "update rule")
    lr: NonNegative = key(3e-4, "peak learning rate")
    schedule: Literal["cosine", "linear", "wsd", "inverse_sqrt", "constant"] = key("cosine", "shape after warm-up")
    warmup: Count = key(0, "steps of linear warm-up")
    final: Fraction = key(0.1, "last learning rate as a share of the peak (cosine, linear, wsd)")
    decay: Fraction = key(0.2, "wsd: share of the steps spent decaying at the end")
    beta1: Share = key(0.9, "first moment (momentum for sgd and muon)")
    beta2: Share = key(0.95, "second moment")
    epsilon: PositiveFloat = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.1, "decoupled weight decay")
    decay_all: Bool = key(False, "decay norms, biases and embeddings too; default: matrices only")
    clip: PositiveFloat | None = key(1.0, "global gradient norm at most")
    ema: Fraction | None = key(None, "decay of an exponential moving average of the weights")


class Loss(Section):
    """Terms of the language-model loss."""

    z_loss: NonNegative = key(0.0, "weight of log(Z)^2")
    balance: NonNegative = key(0.0, "weight of the load-balancing loss of experts, 1 when even")
    router_z: NonNegative = key(0.0, "weight of log(Z)^2 of the router")
    label_smoothing: Share = key(0.0, "probability mass spread over the vocabulary")
    chunks: PositiveInt = key(8, "vocabulary chunks; full logits never exist")


class Step(Section):
    """How one optimizer step is computed."""

    accumulate: PositiveInt = key(1, "microbatches per step")
    remat: Literal["none", "full", "dots"] | tuple[str, ...] = key("none", "what is recomputed; a list: what is saved")
    offload: tuple[str, ...] = key((), "values that wait for the backward pass in host memory")
    unroll: PositiveInt | Literal["all"] = key(1, "layers compiled as one turn of the loop; all: no loop")
    attention: Literal["auto", "reference", "xla", "cudnn", "splash"] = key("auto", "attention kernel")

    @property
    def saves(self) -> str | tuple[str, ...]:
        """`remat` with what is offloaded, which is not computed again either."""
        listed = self.remat if isinstance(self.remat, tuple) else ()
        return (*listed, *self.offload) if self.offload else self.remat


class Checkpoint(Section):
    """Asynchronous sharded checkpoints."""

    every: PositiveInt | None = key(None, "steps between checkpoints; default: only at the end and on signals")
    keep: PositiveInt = key(3, "newest checkpoints kept")
    keep_best: Count = key(0, "best checkpoints kept besides")
    best: str = key("eval/loss", "metric that ranks `keep_best`, lower is better")
    durable: str | None = key(None, "second tier: folder or URL (s3://...) whose NAME/STEP are checked copies")
    durable_every: PositiveInt | None = key(None, "steps between these copies; default: every checkpoint, and the last")


class Eval(Section):
    """Validation during training."""

    every: PositiveInt | None = key(None, "steps between validations; default: only at the end")
    batches: PositiveInt = key(8, "batches of each validation")
    sets: dict[str, Documents] = key({}, "validation sets by name, beside what data.validation keeps")


class Log(Section):
    """What is written and shown."""

    every: PositiveInt = key(1, "steps between logged steps")
    tensorboard: Bool = key(True, "write TensorBoard events")
    wandb: str | None = key(None, "Weights & Biases project; needs jaxtrain[wandb]")
    mlflow: str | None = key(None, "MLflow experiment; needs jaxtrain[mlflow]")
    checkpoints: Bool = key(False, "hand every checkpoint to W&B and MLflow, as an artifact of the run")
    peak_tflops: PositiveFloat | None = key(None, "per-device peak for MFU; default: known chips, measured on CPU")
    sample: Count = key(0, "tokens generated at the end")
    prompt: str = key("\n", "prompt of that sample", min_length=1)


class Config(Section):
    """One training run."""

    name: str = key("run", "name of the run", pattern=r"^\w[\w.\-]*$")
    dir: str = key("runs", "parent folder; the run writes to DIR/NAME")
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = key(0, "seed of initialisation, data order and dropout")
    steps: PositiveInt = key(1000, "optimizer steps")
    simulate: Devices | None = key(None, "run on this many simulated CPU devices")
    precision: Literal["fp32", "bf16", "fp16", "bf16_pure"] = key(
        "bf16", "dtype policy; bf16 and fp16 keep float32 masters, fp16 scales its loss"
    )
    compile_cache: str | None = key(
        "~/.cache/jaxtrain/xla", "folder of the persistent compilation cache; simulated devices do without"
    )
    layout: str = key("ddp", "name in configs/layouts or path: gives all from `mesh` to `pipeline`")
    mesh: Mesh = section(Mesh, "sizes of the mesh axes; refines the layout's")
    rules: dict[str, Axes] = key(
        {}, "logical name -> mesh axes; refines the layout's. `table`, an embedding's width, follows vocab and embed"
    )
    context: Literal["auto", "gather", "ulysses", "ring"] = key(
        "auto",
        "how attention crosses the shards of a sequence; auto: ulysses where they divide a device's heads, else gather",
    )
    zero: Stage = key(0, "ZeRO over `data`: in shards are 1 optimizer state, 2 also gradients, 3 also parameters")
    pipeline: Pipeline = section(Pipeline, "the schedule of pipeline stages")
    model: Model = section(Model, "the model")
    data: Data = section(Data, "the data")
    loss: Loss = section(Loss, "loss terms")
    optimizer: Optimizer = section(Optimizer, "the optimizer")
    step: Step = section(Step, "one step")
    checkpoint: Checkpoint = section(Checkpoint, "checkpoints")
    eval: Eval = section(Eval, "validation")
    log: Log = section(Log, "logging")
    guard: tuple[str, ...] = key(
        (), "skip@Z or rollback@Z[:BACK:BATCHES]: on spikes above a z-score; check@STEPS: compute a step twice"
    )
    faults: tuple[str, ...] = key(
        (), "failures to test recovery with: KIND@[PLACE:]STEP[/PROCESS], e.g. kill@12, kill@save:8, nan@5, flip@7"
    )

    @property
    def run_dir(self) -> Path:
        """Folder this run writes to."""
        return Path(os.path.expanduser(self.dir)) / self.name
