"""The schema of a configuration: every field with its meaning, its bounds, and the contradictions that are refused."""

import os
import warnings
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Width = Annotated[int, Field(ge=1, le=2**20)]

LARGEST = 2**40
"""No number may be larger: products of two still fit the integers that tensors are measured in."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        section = type(self).__name__.removesuffix("Config").lower()
        for name, value in self:
            if isinstance(value, int | float) and value > LARGEST:
                raise ValueError(f"{section}.{name} is larger than 2**40")
            if isinstance(value, Path) and not _can_be_path(value):
                raise ValueError(f"{section}.{name} holds a character that no path can")
        return self


def _can_be_path(path: Path) -> bool:
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


class RunConfig(_Section):
    """Where the run lives and what it is seeded with."""

    name: str | None = Field(None, pattern=r"^[\w][\w.-]*$")
    """The run's folder under `dir`; none = the configuration file's name."""
    dir: Path = Path("runs")
    """The folder that holds all runs."""
    seed: int = Field(1, ge=0, lt=2**31)
    """Seeds the weights, the order of samples, and dropout."""


class DataConfig(_Section):
    """The corpus."""

    source: str = Field("sample", min_length=1)
    """`sample`, `wikitext-2`, `wikitext-2-raw`, `wikitext-103`, a hub id (`owner/name`), a folder, or a file."""
    subset: str | None = None
    """The hub data set's configuration name."""
    revision: str | None = None
    """The hub data set's revision; the known names have theirs pinned."""
    text_column: str = "text"
    """The column (parquet, hub) or key (JSON lines) that holds the text."""
    dir: Path = Path("data")
    """The folder for corpora and token stores."""
    sample_tokens: int = Field(1_000_000, ge=1_000, le=10**9)
    """Training tokens of the built-in sample corpus; validation and test get a twentieth each."""

    @model_validator(mode="after")
    def _no_address(self) -> Self:
        if "://" in self.source:
            raise ValueError(
                "data.source is an address, and lmtrain fetches none: download the file and name its path, or name "
                "a hub data set as owner/name"
            )
        return self


class TokenizerConfig(_Section):
    """Text to ids; trained on the training split only."""

    kind: Literal["word", "bpe", "byte"] = "word"
    """Whole words with `<unk>`, byte-level BPE, or bytes."""
    vocab_size: int | None = Field(None, ge=4, le=1_000_000)
    """Entries at most. None = every word of the training split, 16,384 for bpe; byte has its own size."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kind == "byte" and self.vocab_size is not None:
            raise ValueError("tokenizer.vocab_size has no meaning with tokenizer.kind=byte: leave it out")
        if self.kind == "bpe" and self.vocab_size is not None and self.vocab_size < 257:
            raise ValueError("tokenizer.vocab_size must be at least 257 with tokenizer.kind=bpe: 256 bytes and <eos>")
        return self


MASKED_ATTENTION = ("full", "local", "strided", "global")
"""Attention that differs in its mask alone."""
UNMASKABLE_ATTENTION = ("linformer", "induced")
"""Attention whose keys are mixtures of the whole window, so that no mask can hide the future."""
ATTENTION = (*MASKED_ATTENTION, "compressed", "linear", *UNMASKABLE_ATTENTION)

# `copy` is the field's name in the literature; the deprecated method of pydantic that it hides is not used here.
warnings.filterwarnings("ignore", message='Field name "copy" in "ModelConfig" shadows', category=UserWarning)


class ModelConfig(_Section):
    """The shape of the language model."""

    mode: Literal["causal", "windowed"] = "causal"
    """`causal`: a prediction at every position. `windowed`: one prediction for each window, read in both directions."""
    context: int = Field(128, ge=1, le=2**20)
    """Tokens in a window: the longest context that a prediction has."""
    dim: Width = 256
    """Width of the residual stream."""
    embed_dim: Width | None = None
    """Width of the embedding and of the output layer's input; None = `dim`."""
    layers: int = Field(4, ge=0, le=256)
    """Encoder blocks below the pooling head."""
    heads: int = Field(4, ge=1)
    """Attention heads, in the blocks and in the pooling head."""
    ff_dim: Width | None = None
    """Hidden width of the feed-forward layers; None = 4 `dim`."""
    activation: Literal["relu", "relu2", "gelu", "swiglu"] = "gelu"
    """Non-linearity of the feed-forward layers."""
    norm: Literal["layer", "rms", "scale"] = "rms"
    """LayerNorm, RMSNorm or ScaleNorm."""
    norm_position: Literal["pre", "post"] = "pre"
    """Norms before each sub-layer of the encoder blocks, or after the addition. The pooling head has them before."""
    attention: str | tuple[str, ...] = "full"
    """`full`, `local`, `strided`, `global`, unions of those (`local+global`), `compressed` or `linear`; and, where the
    mode is windowed, `linformer` or `induced`. A list names one for each layer."""
    attention_window: int = Field(32, ge=1)
    """`local`: a token sees those less than so many positions away."""
    attention_stride: int = Field(8, ge=1)
    """`strided`: a token sees those at multiples of so many positions away."""
    attention_globals: int = Field(4, ge=1)
    """`global`: the first tokens of a window, so many, see all and are seen by all."""
    compression: int = Field(4, ge=2)
    """`compressed`: tokens that are made into one key."""
    projected_length: int = Field(32, ge=1)
    """`linformer`: keys that the window's are projected to."""
    inducing_points: int = Field(16, ge=1)
    """`induced`: points that stand between a token and the others."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    position: Literal["sinusoidal", "learned", "rotary", "alibi", "none"] = "rotary"
    """How positions enter the encoder blocks."""
    pool_query: Literal["seed", "recency", "position"] = "recency"
    """The pooling query: a learned seed; with a learned recency slope per head; or also from the position's state."""
    pool_residual: Literal["seed", "state"] = "state"
    """What the pooled value is added to: the seed, or the state of the last position."""
    copy: bool = False  # type: ignore[assignment]
    """Mix a pointer over the tokens of the context into the prediction (pointer-generator)."""
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    output_bias: bool = True
    """A bias on the logits, started at the log frequencies of the training tokens."""
    dropout: Rate = 0.0
    """Dropout on the output of every sub-layer."""
    attention_dropout: Rate = 0.0
    """Dropout on attention weights."""
    embedding_dropout: Rate = 0.0
    """Share of word types whose embedding is dropped whole, for a step."""
    input_dropout: Rate = 0.0
    """Dropout on the embedded input, one mask for all positions of a sequence."""
    output_dropout: Rate = 0.0
    """Dropout on the pooled state before the output layer, one mask for all positions of a sequence."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"model.dim={self.dim} can't be divided among model.heads={self.heads}")
        if self.position == "rotary" and (self.dim // self.heads) % 2:
            raise ValueError(f"model.position=rotary needs an even width per head, not {self.dim // self.heads}")
        if self.position == "sinusoidal" and self.dim % 2:
            raise ValueError(f"model.position=sinusoidal needs an even model.dim, not {self.dim}")
        self._check_attention()
        return self

    @property
    def layer_attention(self) -> tuple[str, ...]:
        """The attention of each layer."""
        return (self.attention,) * self.layers if isinstance(self.attention, str) else self.attention

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
                    f"model.attention={name} can't be causal, its keys being mixtures of the whole window: "
                    "use model.mode=windowed or another attention"
                )
            if self.position == "alibi" and not masked:
                raise ValueError(
                    f"model.position=alibi is a bias on scores, which model.attention={name} has no place for: "
                    "use rotary, sinusoidal or learned"
                )
            if self.position == "rotary" and name == "induced":
                raise ValueError(
                    "model.position=rotary needs keys with positions, and inducing points have none: "
                    "with model.attention=induced use sinusoidal or learned"
                )


class TrainConfig(_Section):
    """The optimisation, its budget and its cadence."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward and backward pass; weights stay in float32. `auto`: bf16 where the hardware has it."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile; `auto` compiles when the run is long enough to earn it back."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads; None = the physical cores. Part of what makes a run repeatable bit for bit."""

    batch_size: int = Field(32, ge=1)
    """Windows per optimizer step."""
    micro_batch: int | None = Field(None, ge=1)
    """Windows per forward pass; gradients are accumulated up to `batch_size`. None = the whole batch."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Targets whose logits exist at once, for less memory. None = all of a forward pass; `auto` = all up to 1 GiB of
    float32 logits, beyond that a sixteenth of the targets and at least 512."""
    steps: int | None = Field(None, ge=1)
    """Budget in optimizer steps. With no budget of any kind the run takes 10 epochs."""
    epochs: float | None = Field(None, gt=0)
    """Budget in passes over the training tokens."""
    max_minutes: float | None = Field(None, gt=0)
    """Budget in minutes of wall-clock time. The schedule then follows the clock too."""

    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; `wsd` is warm-up, stable, then linear decay."""
    warmup: Rate = 0.02
    """Share of the run over which the learning rate rises from zero."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of the run over which `wsd` decays."""
    final_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and slopes have none."""
    embedding_weight_decay: float | None = Field(None, ge=0)
    """Weight decay of the embedding; None = `weight_decay`."""
    beta1: Rate = 0.9
    """Decay of the mean of the gradient."""
    beta2: Rate = 0.95
    """Decay of the mean of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of that mean."""
    clip: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient; None = no clipping."""
    spike_sigmas: float | None = Field(None, gt=0)
    """Leave out a step whose loss or gradient norm is this many standard deviations above its mean; None = none."""
    scheduled_sampling: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the input tokens that are the model's own predictions at the end of the run, rising from none in a line;
    costs a second forward pass."""
    ema: Rate | None = None
    """Decay of an exponential moving average of the weights, evaluated and saved beside them; None = none."""

    log_steps: int = Field(10, ge=1)
    """Steps between two logged points."""
    eval_steps: int | None = Field(None, ge=1)
    """Steps between two evaluations."""
    eval_epochs: float | None = Field(None, gt=0)
    """Passes over the training tokens between two evaluations. Neither = once an epoch and at the end."""
    eval_tokens: int | None = Field(None, ge=1)
    """Validation tokens of the evaluations during training; None = all. The last evaluation always takes all."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a new best; None = never."""
    save_minutes: float = Field(5.0, gt=0)
    """Minutes between two checkpoints; one is also saved at each new best and at the end."""
    keep: int = Field(2, ge=1)
    """Checkpoints kept beside the best."""
    sample_prompts: tuple[str, ...] = ("The",)
    """Prompts continued for TensorBoard at each evaluation."""
    sample_tokens: int = Field(40, ge=1, le=1000)
    """Tokens of each of those continuations."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("train.steps and train.epochs contradict each other: give one")
        if self.eval_steps is not None and self.eval_epochs is not None:
            raise ValueError("train.eval_steps and train.eval_epochs contradict each other: give one")
        if self.spike_sigmas is not None and self.precision == "fp16":
            raise ValueError("train.spike_sigmas needs train.precision=bf16 or fp32: fp16 skips steps by its own scale")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(
                f"train.batch_size={self.batch_size} can't be divided into train.micro_batch={self.micro_batch}"
            )
        return self


class EvalConfig(_Section):
    """How perplexity is measured."""

    stride: int | None = Field(None, ge=1)
    """Tokens scored per window; the rest of the window is context. None = a quarter of the context (1 if windowed)."""
    batch_size: int = Field(32, ge=1)
    """Windows per forward pass; changes the speed and nothing else."""


class Config(_Section):
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
        if self.model.mode == "windowed" and self.train.scheduled_sampling:
            raise ValueError(
                f"train.scheduled_sampling={self.train.scheduled_sampling} needs a prediction at every position: "
                "use model.mode=causal"
            )
        if self.model.mode == "windowed" and self.eval.stride not in (None, 1):
            raise ValueError(
                f"eval.stride={self.eval.stride}: a windowed model predicts one token per window, so only 1 fits"
            )
        return self


RESOURCE_FIELDS = frozenset(
    {
        "run.name",
        "run.dir",
        *(f"data.{field}" for field in DataConfig.model_fields),  # the content counts, and is compared by its hash
        "train.device",
        "train.compile",
        "train.threads",
        "train.micro_batch",
        "train.loss_chunk",
        "train.log_steps",
        "train.save_minutes",
        "train.keep",
        "train.sample_prompts",
        "train.sample_tokens",
        "eval.stride",
        "eval.batch_size",
    }
)
"""Fields that may change between the parts of a resumed run; every other field is the run's identity."""
