"""The schema of a configuration: every field with its meaning and bounds, and the rejected combinations."""

import os
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

RUN_NAME = r"\A\w[\w.-]*\Z"
LEAST_BPE = 257
"""The smallest byte-level vocabulary: 256 bytes and `<eos>`."""
BUDGETS = ("steps", "epochs", "tokens")
"""The fields that give the budget as a number of steps; a run has at most one of them."""
LARGEST = 2**40
"""No number may be larger, so that products of two fit into int64."""


def _expanded(path: Path) -> Path:
    """Replace `~`. Raises ValueError if there can't be such a path."""
    try:
        if b"\0" in os.fsencode(path):
            raise ValueError
        return path.expanduser()
    except ValueError:  # of which UnicodeEncodeError is a kind
        raise ValueError("holds a character that no path can contain, or none in this locale") from None
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _listed(value: Any) -> Any:
    """One value as a list of one, and null as an empty list."""
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


UserPath = Annotated[Path, AfterValidator(_expanded)]
"""A path in which `~` means the home folder, which a shell does not expand in a file or after `data.dir=`."""
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Width = Annotated[int, Field(ge=1, le=2**20)]


class Section(BaseModel):
    """A section: immutable, without unknown fields or unbounded numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, regex_engine="python-re"
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _number(cls, value: object, read: ValidatorFunctionWrapHandler) -> Any:
        result = read(value)
        if isinstance(value, bool) and not isinstance(result, bool):  # pydantic reads true as 1
            raise ValueError("a number is needed")
        if isinstance(result, int | float) and result > LARGEST:
            raise ValueError("a number may not be larger than 2**40")
        return result


class RunConfig(Section):
    """Where the run is stored, and its seed."""

    name: str | None = Field(None, pattern=RUN_NAME)
    """The folder of the run under `dir`; null = the name of the configuration file, or else of the text."""
    dir: UserPath = Path("runs")
    """The folder of all runs."""
    seed: int = Field(1, ge=0, lt=2**31)
    """Seed of the weights, the order of samples, and dropout."""


class DataConfig(Section):
    """The corpus."""

    source: str = Field("sample", min_length=1)
    """`sample`, `wikitext-2`, `wikitext-2-raw`, `wikitext-103`, a hub id (`owner/name`), a file of text, or a folder,
    which is read with its subfolders."""
    subset: str | None = None
    """Configuration name of the hub dataset."""
    revision: str | None = None
    """Revision of the hub dataset; the known names have pinned ones."""
    text_column: str = "text"
    """The column (CSV, parquet, hub) or key (JSON) that holds the text."""
    dir: UserPath = Path("data")
    """The folder for corpora and token stores."""
    sample_tokens: int = Field(1_000_000, ge=1_000, le=10**9)
    """Training tokens of the built-in sample corpus; validation and test get a twentieth each, at least 5,000."""

    @model_validator(mode="after")
    def _no_address(self) -> Self:
        if "://" in self.source:
            raise ValueError(
                "data.source is an address, which lmtrain does not download: download the file and give its path, or "
                "name a hub dataset as owner/name"
            )
        return self


class TokenizerConfig(Section):
    """How text becomes token ids."""

    kind: Literal["auto", "word", "bpe", "byte"] = "auto"
    """Whole words with `<unk>`, byte-level BPE, or bytes. auto: `word` if spaces set punctuation apart in the training
    split, as in WikiText, else `bpe`."""
    vocab_size: int | None = Field(None, ge=4, le=1_000_000)
    """Maximum number of entries. null = every word of the training split, or for bpe a number that fits its size; byte
    has a fixed size."""
    file: UserPath | None = None
    """Use this tokenizer.json (of a run, a token store or any published model) instead of training one; `kind` and
    `vocab_size` then have no effect."""
    eos_token: str | None = Field(None, min_length=1)
    """The token of `file` that ends each document. null = the one that a tokenizer_config.json or
    special_tokens_map.json beside it names, or else one of a usual name such as `<|endoftext|>` or `</s>`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eos_token is not None and self.file is None:
            raise ValueError("tokenizer.eos_token is a token of tokenizer.file: give the file, or leave it out")
        if self.kind == "byte" and self.vocab_size is not None:
            raise ValueError("tokenizer.vocab_size has no meaning with tokenizer.kind=byte: leave it out")
        if self.kind == "bpe" and self.vocab_size is not None and self.vocab_size < LEAST_BPE:
            raise ValueError(
                f"tokenizer.vocab_size must be at least {LEAST_BPE} with tokenizer.kind=bpe: 256 bytes and <eos>"
            )
        return self


MASKED_ATTENTION = ("full", "local", "strided", "global")
"""Attention that differs only in its mask."""
UNMASKABLE_ATTENTION = ("linformer", "induced")
"""Attention whose keys mix the whole window, so that no mask can hide the future."""
ATTENTION = (*MASKED_ATTENTION, "compressed", "linear", *UNMASKABLE_ATTENTION)

# pydantic has a deprecated method `copy`, which is not used here.
warnings.filterwarnings("ignore", message='Field name "copy" in "ModelConfig" shadows', category=UserWarning)


class ModelConfig(Section):
    """The shape of the language model."""

    mode: Literal["causal", "windowed"] = "causal"
    """`causal`: one prediction per position. `windowed`: one prediction per window, whose tokens are read in both
    directions."""
    context: int = Field(128, ge=1, le=2**20)
    """Tokens in a window (a training sequence): the longest context of a prediction."""
    dim: Width = 256
    """Width of the residual stream."""
    embed_dim: Width | None = None
    """Width of the embedding and of the input of the output layer; null = `dim`."""
    layers: int = Field(4, ge=0, le=256)
    """Encoder blocks below the attention pool."""
    heads: int = Field(4, ge=1)
    """Attention heads, in the blocks and in the attention pool."""
    ff_dim: Width | None = None
    """Hidden width of the feed-forward layers; null = 4 `dim`."""
    activation: Literal["relu", "gelu", "swiglu"] = "gelu"
    """Activation function of the feed-forward layers; `swiglu` adds a gate of the same width."""
    norm: Literal["layer", "rms", "scale"] = "rms"
    """LayerNorm, RMSNorm or ScaleNorm."""
    norm_position: Literal["pre", "post"] = "pre"
    """Norm before each sublayer of the encoder blocks, or after the residual addition. The attention pool is
    always pre-norm."""
    attention: str | tuple[str, ...] = "full"
    """`full`, `local`, `strided`, `global`, unions of those (`local+global`), `compressed` or `linear`; if windowed,
    also `linformer` or `induced`. A list has one for each layer."""
    attention_window: int = Field(32, ge=1)
    """`local`: attend to tokens fewer than this many positions away."""
    attention_stride: int = Field(8, ge=1)
    """`strided`: attend to tokens at multiples of this distance."""
    attention_globals: int = Field(4, ge=1)
    """`global`: this many learned tokens before the sequence, to which all tokens attend and which, if windowed, attend
    to all tokens."""
    compression: int = Field(4, ge=2)
    """`compressed`: tokens per key."""
    projected_length: int = Field(32, ge=1)
    """`linformer`: keys that the keys of a window are projected to."""
    inducing_points: int = Field(16, ge=1)
    """`induced`: number of inducing points."""
    qk_norm: bool = False
    """Apply RMSNorm to the queries and keys of each head."""
    token_shift: bool = False
    """Add the previous token's embedding to that of each token, times a learned gain for each feature."""
    position: Literal["sinusoidal", "learned", "rotary", "alibi", "none"] = "rotary"
    """Position encoding of the encoder blocks."""
    pool_query: Literal["seed", "recency"] = "recency"
    """The pooling query: a learned seed, or a seed with a learned recency slope per head."""
    pool_residual: Literal["seed", "state"] = "state"
    """What the pooled value is added to: the seed, or the state of the last position."""
    copy: bool = False  # type: ignore[assignment]
    """Mix a pointer over the tokens of the context into the prediction (pointer-generator)."""
    output: Literal["softmax", "adaptive"] = "softmax"
    """`adaptive`: adaptive softmax, which predicts the cluster of a rare word, then the word; training computes fewer
    logits."""
    output_cutoffs: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    """`adaptive`: the token ids at which the clusters begin; more frequent tokens have none. null = a sixteenth and a
    quarter of the vocabulary."""
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    dropout: Fraction = 0.0
    """Dropout on the output of every sublayer."""
    attention_dropout: Fraction = 0.0
    """Dropout on attention weights."""
    input_dropout: Fraction = 0.0
    """Dropout on the embedded input, with one mask for all positions of a sequence."""
    output_dropout: Fraction = 0.0
    """Dropout on the pooled state, with one mask for all positions of a sequence."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"model.dim={self.dim} can't be divided among model.heads={self.heads}")
        if self.position == "rotary" and (self.dim // self.heads) % 2:
            width = self.dim // self.heads
            raise ValueError(
                f"model.position=rotary needs an even width per head, and model.dim={self.dim} / "
                f"model.heads={self.heads} is {width}"
            )
        if self.position == "sinusoidal" and self.dim % 2:
            raise ValueError(f"model.position=sinusoidal needs an even model.dim, not {self.dim}")
        if self.output_cutoffs is not None and list(self.output_cutoffs) != sorted(set(self.output_cutoffs)):
            raise ValueError(f"model.output_cutoffs={self.output_cutoffs}: each must be greater than the one before")
        self._check_attention()
        return self

    @property
    def layer_attention(self) -> tuple[str, ...]:
        """The attention of each layer."""
        return (self.attention,) * self.layers if isinstance(self.attention, str) else self.attention

    @property
    def global_tokens(self) -> int:
        """How many learned tokens come before the sequence: none, unless a layer has global attention."""
        return self.attention_globals if any("global" in kind.split("+") for kind in self.layer_attention) else 0

    def _check_attention(self) -> None:
        if not isinstance(self.attention, str) and len(self.attention) != self.layers:
            raise ValueError(f"model.attention names {len(self.attention)} layers, and model.layers={self.layers}")
        for name in {self.attention} if isinstance(self.attention, str) else set(self.attention):
            parts = name.split("+")
            if any(part not in ATTENTION for part in parts):
                raise ValueError(f"model.attention={name}: choose among {', '.join(ATTENTION)}")
            masked = all(part in MASKED_ATTENTION for part in parts)
            if len(parts) > 1 and (not masked or "full" in parts or len(set(parts)) < len(parts)):
                raise ValueError(f"model.attention={name}: a union is made of local, strided and global, each once")
            if name in UNMASKABLE_ATTENTION and self.mode == "causal":
                raise ValueError(
                    f"model.attention={name} can't be causal, because its keys mix the whole window: "
                    "use model.mode=windowed or another attention"
                )
            if name == "linformer" and self.global_tokens:
                raise ValueError(
                    "model.attention: linformer and global don't go together, because linformer has weights for each "
                    "position of a window, and global tokens come before it: leave one of them out"
                )
            if self.position == "alibi" and not masked:
                raise ValueError(
                    f"model.position=alibi is a bias on attention scores, which model.attention={name} does not have: "
                    "use rotary, sinusoidal or learned"
                )
            if self.position == "rotary" and name == "induced":
                raise ValueError(
                    "model.position=rotary needs keys with positions, and inducing points have none: "
                    "with model.attention=induced use sinusoidal or learned"
                )


class TrainConfig(Section):
    """Optimization, its budget, and how often to log, evaluate and save."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses CUDA if available."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward and backward pass; weights are float32. `auto`: bf16 if the hardware supports it, else
    fp16 on a GPU and fp32 on a CPU."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile; `auto` compiles if the run is long enough to save more time than compiling takes."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads; null = PyTorch's default. Other values may change the last bits of results."""

    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How processes started by torchrun share a model. `ddp`: replicas; `fsdp`: shards; `auto`: `ddp` if weights,
    gradients and optimizer state fill less than half of the device, or can't be sharded."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Minutes to wait for a process that does not answer before all of them exit."""
    activation_checkpointing: bool = False
    """Recompute the activations of a block in the backward pass: less memory, more time, the same bits."""

    batch_size: int = Field(32, ge=1)
    """Sequences of `context` tokens per optimizer step, over all processes."""
    micro_batch: int | None = Field(None, ge=1)
    """Sequences per forward pass; gradients are accumulated up to `batch_size`. null = `batch_size` / number of
    processes."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Targets whose logits are computed at once, to save memory. null = all; `auto` = all up to 1 GiB of float32
    logits, else a sixteenth but at least 512."""
    steps: int | None = Field(None, ge=1)
    """Budget in optimizer steps. With no budget set: 10 epochs, or 10 minutes if no configuration is given."""
    epochs: float | None = Field(None, gt=0)
    """Budget in passes over the training tokens."""
    tokens: int | None = Field(None, ge=1)
    """Budget in predicted tokens (one per sequence in a windowed model), rounded up to a whole step."""
    max_minutes: float | None = Field(None, gt=0)
    """Budget in minutes of wall-clock time, including compilation. The schedule then follows the clock too."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of all layers but embedding and output, AdamW for the rest; both use `lr`."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate. Word embeddings, and an untied output layer, of width E have `lr` / sqrt(E); the gains of
    norms and of the token shift 5 `lr`."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warmup; `wsd` is warmup, stable, linear decay. With `wsd` or `constant` a run can be
    resumed with a larger budget in steps, epochs or tokens."""
    warmup: float = Field(0.02, ge=0)
    """Fraction of the run over which the learning rate rises from zero; from 1 on, a number of steps."""
    decay: float = Field(0.2, gt=0, le=1)
    """Fraction of the run over which `wsd` decays; at most 1 - `warmup`."""
    final_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak; at least 0.001."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and slopes have none."""
    beta1: Fraction = 0.9
    """Decay of the mean of the gradient; Muon uses 0.95 for its matrices."""
    beta2: Fraction = 0.95
    """Decay of the mean of the squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """Added to the square root of the mean of the squared gradient."""
    clip: float | None = Field(1.0, gt=0)
    """Maximum norm of the gradient; null = no clipping."""
    token_noise: Fraction = 0.0
    """Fraction of the input tokens that are replaced by samples from all training tokens; targets are unchanged (Xie et
    al., 2017)."""
    init_from: UserPath | None = None
    """Start from the best weights of this run. It must have the same tokenizer and model, except for dropout and,
    unless positions are learned or attention is `linformer`, `context`."""
    teacher: Annotated[tuple[UserPath, ...], BeforeValidator(_listed)] = ()
    """Distill from the best checkpoint of a run, or from the mean of the predictions of a list of runs. They must have
    the same tokenizer and mode and at least this `context`. All logits are then computed at once, regardless of
    `loss_chunk`."""
    teacher_weight: float = Field(0.5, gt=0, le=1)
    """Weight of the distillation loss; 1 = learn only from the teacher."""
    ema: Fraction | None = None
    """Decay of an exponential moving average of the weights, which is evaluated and saved with them; null = none."""

    log_steps: int = Field(10, ge=1)
    """Steps between two logged points; the first step is logged too."""
    eval_steps: int | None = Field(None, ge=1)
    """Steps between two evaluations. null = at each twentieth of the budget, or less often so that evaluations take
    about a tenth of the time at most. The end of a run is always evaluated."""
    eval_tokens: int | None = Field(None, ge=1)
    """Validation tokens per evaluation during training; null = all. The final score always uses all."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a new best score; null = never."""
    save_minutes: float = Field(5.0, gt=0)
    """Minutes between two checkpoints; each evaluation also saves one."""
    keep: int = Field(2, ge=1)
    """Latest checkpoints to keep, in addition to the best, and with `wsd` the last one before the decay."""
    sample_prompts: tuple[str, ...] = ("The",)
    """Prompts that are continued for TensorBoard at each evaluation."""
    sample_tokens: int = Field(40, ge=1, le=1000)
    """Tokens of each of these continuations."""

    @property
    def rows(self) -> int:
        """The sequences of a micro-batch."""
        return self.micro_batch or self.batch_size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        budgets = [f"train.{name}" for name in BUDGETS if getattr(self, name) is not None]
        if len(budgets) > 1:
            raise ValueError(f"{' and '.join(budgets)} contradict each other: give one, and set the others to null")
        if self.warmup >= 1 and self.max_minutes is not None:
            raise ValueError(
                f"train.warmup={self.warmup:g} is a number of steps, and with train.max_minutes the schedule follows "
                "the clock: give the warmup as a fraction of the run"
            )
        if self.schedule == "wsd" and self.warmup < 1 < self.warmup + self.decay - 1e-9:
            raise ValueError(
                f"train.warmup={self.warmup} and train.decay={self.decay} are together more than the whole run, "
                "so that train.schedule=wsd would do both at once: lower one of them"
            )
        if self.batch_size % self.rows:
            raise ValueError(
                f"train.batch_size={self.batch_size} can't be divided into train.micro_batch={self.micro_batch}"
            )
        return self


class EvalConfig(Section):
    """How perplexity is measured."""

    stride: int | None = Field(None, ge=1)
    """Tokens scored per window; the other tokens are context. null = a quarter of the context, or 1 if windowed."""
    batch_size: int = Field(32, ge=1)
    """Windows per forward pass; changes speed and rounding only."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Divides the logits in `lmtrain eval`; the pointer of `model.copy` is unchanged."""
    cache_weight: Fraction = 0.1
    """`--cache`: weight of the cache in the prediction."""
    cache_theta: float = Field(20.0, ge=0.0)
    """`--cache`: multiplies the cosine similarity of two states, before the softmax over earlier ones."""
    cache_window: int = Field(8_000, ge=1)
    """`--cache`: number of tokens in the cache."""
    dynamic_lr: float = Field(1e-4, ge=0.0)
    """`--dynamic`: base learning rate, to which the rate of each weight is proportional."""
    dynamic_embedding: float = Field(0.1, ge=0.0)
    """`--dynamic`: factor of that rate for the embedding and the output layer."""


class Config(Section):
    """Everything that defines a run."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.eval.stride is not None and self.eval.stride > self.model.context:
            raise ValueError(f"eval.stride={self.eval.stride} is longer than model.context={self.model.context}")
        if self.model.mode == "windowed" and self.eval.stride not in (None, 1):
            raise ValueError(
                f"eval.stride={self.eval.stride}: a windowed model predicts one token per window, so only 1 fits"
            )
        return self


SECTIONS: dict[str, dict[str, FieldInfo]] = {name: type(section).model_fields for name, section in Config()}
"""The fields of each section."""
CHANGEABLE_FIELDS = frozenset(
    {
        "run.name",
        "run.dir",
        *(f"data.{field}" for field in SECTIONS["data"]),  # the content is compared by a hash
        *(f"tokenizer.{field}" for field in SECTIONS["tokenizer"]),  # likewise
        "train.device",
        "train.compile",
        "train.threads",
        "train.parallel",
        "train.timeout_minutes",
        "train.activation_checkpointing",
        "train.micro_batch",
        "train.loss_chunk",
        "train.log_steps",
        "train.save_minutes",
        "train.keep",
        "train.teacher",  # its checkpoint is compared by a hash
        "train.sample_prompts",
        "train.sample_tokens",
        *(f"eval.{field}" for field in SECTIONS["eval"]),
    }
)
"""Fields that may change when a run is resumed; all others but `SCHEDULE_FIELDS` are the identity of the run."""
SCHEDULE_FIELDS = frozenset({*(f"train.{field}" for field in BUDGETS), "train.warmup"})
"""Fields that may change if the steps that are done stay the same; see `lmtrain.training.continuing`."""
