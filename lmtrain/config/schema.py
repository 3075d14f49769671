"""The schema of a configuration: every field with its meaning, its bounds, and the contradictions that are refused."""

import warnings
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lmtrain.config.base import Place, Rate, Section
from lmtrain.config.train import TrainConfig as TrainConfig  # noqa: PLC0414 -- for its importers

RUN_NAME = r"^[\w][\w.-]*$"
Width = Annotated[int, Field(ge=1, le=2**20)]


class RunConfig(Section):
    """Where the run lives and what it is seeded with."""

    name: str | None = Field(None, pattern=RUN_NAME)
    """The run's folder under `dir`; none = the configuration file's name."""
    dir: Place = Path("runs")
    """The folder that holds all runs."""
    seed: int = Field(1, ge=0, lt=2**31)
    """Seeds the weights, the order of samples, and dropout."""


class _Source(Section):
    """Where one corpus comes from."""

    source: str = Field("sample", min_length=1)
    """`sample`, `wikitext-2`, `wikitext-2-raw`, `wikitext-103`, a hub id (`owner/name`), a folder, or a file."""
    subset: str | None = None
    """The hub data set's configuration name."""
    revision: str | None = None
    """The hub data set's revision; the known names have theirs pinned."""
    text_column: str = "text"
    """The column (parquet, hub) or key (JSON lines) that holds the text."""

    @model_validator(mode="after")
    def _no_address(self) -> Self:
        if "://" in self.source:
            raise ValueError(
                "data.source is an address, and lmtrain fetches none: download the file and name its path, or name "
                "a hub data set as owner/name"
            )
        return self


class SourceConfig(_Source):
    """One corpus of a mixture."""

    weight: int = Field(1, ge=1, le=1000)
    """Its share of the training samples, over the sum of all weights."""


class DataConfig(_Source):
    """The corpus, or several in a mixture."""

    sources: tuple[SourceConfig, ...] | None = Field(None, min_length=1, max_length=100)
    """A mixture, in place of `source`: corpora with weights. Of validation and test texts the first one's are used."""
    dir: Place = Path("data")
    """The folder for corpora and token stores."""
    sample_tokens: int = Field(1_000_000, ge=1_000, le=10**9)
    """Training tokens of the built-in sample corpus; validation and test get a twentieth each."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.sources is not None and (self.source, self.subset, self.revision) != ("sample", None, None):
            raise ValueError(
                f"data.source={self.source[:200]} and data.sources contradict: name all corpora in data.sources"
            )
        return self


class TokenizerConfig(Section):
    """Text to ids; trained on the training split only."""

    kind: Literal["word", "bpe", "byte"] = "word"
    """Whole words with `<unk>`, byte-level BPE, or bytes."""
    vocab_size: int | None = Field(None, ge=4, le=1_000_000)
    """Entries at most. None = every word of the training split, 16,384 for bpe; byte has its own size."""
    file: Place | None = None
    """A tokenizer.json to take as it is, a run's or a store's, in place of training one; `kind` and `vocab_size` then
    are its own, whatever is said here."""

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


class ModelConfig(Section):
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
    pool_query: Literal["seed", "recency"] = "recency"
    """The pooling query: a learned seed, or one with a learned recency slope per head."""
    pool_residual: Literal["seed", "state"] = "state"
    """What the pooled value is added to: the seed, or the state of the last position."""
    copy: bool = False  # type: ignore[assignment]
    """Mix a pointer over the tokens of the context into the prediction (pointer-generator)."""
    output: Literal["softmax", "adaptive"] = "softmax"
    """`adaptive`: predict a rare word's cluster first and the word within it, so that training makes few logits."""
    output_cutoffs: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(None, min_length=1)
    """`adaptive`: the token ids at which the clusters begin, the frequent tokens below the first being in none. None =
    a sixteenth and a quarter of the vocabulary. It saves work where ids fall in frequency, as with word and bpe."""
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    output_bias: bool = True
    """A bias on the logits, started at the log frequencies of the training tokens."""
    dropout: Rate = 0.0
    """Dropout on the output of every sub-layer."""
    attention_dropout: Rate = 0.0
    """Dropout on attention weights."""
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
        if self.output_cutoffs is not None and list(self.output_cutoffs) != sorted(set(self.output_cutoffs)):
            raise ValueError(f"model.output_cutoffs={self.output_cutoffs}: each must be greater than the one before")
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


class EvalConfig(Section):
    """How perplexity is measured."""

    stride: int | None = Field(None, ge=1)
    """Tokens scored per window; the rest of the window is context. None = a quarter of the context (1 if windowed)."""
    batch_size: int = Field(32, ge=1)
    """Windows per forward pass; changes the speed and nothing else."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """`lmtrain eval` divides the logits of the vocabulary by it; the pointer of `model.copy` stays as it is."""
    cache_weight: Rate = 0.1
    """`eval --cache`: the share of the cache in the prediction."""
    cache_theta: float = Field(20.0, ge=0.0)
    """`eval --cache`: multiplies the cosine of two states, before the softmax over the earlier ones."""
    cache_window: int = Field(8_000, ge=1)
    """`eval --cache`: the words that the cache remembers."""
    dynamic_rule: Literal["rms", "sgd"] = "rms"
    """`eval --dynamic`: gradients divided by their root mean square on the training split, or as they are."""
    dynamic_lr: float | None = Field(None, ge=0.0)
    """`eval --dynamic`: the learning rate; None = 1e-4 for rms, 0.02 for sgd."""
    dynamic_embedding: float | None = Field(None, ge=0.0)
    """`eval --dynamic`: times that rate for the embedding and the output layer; None = 1."""
    dynamic_decay: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """`eval --dynamic`: how far each step goes back to the trained weights; rms: in proportion to a weight's RMS."""


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


RESOURCE_FIELDS = frozenset(
    {
        "run.name",
        "run.dir",
        *(f"data.{field}" for field in DataConfig.model_fields),  # content and weights are compared by a hash
        "tokenizer.file",  # its content is compared by a hash
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
        *(f"eval.{field}" for field in EvalConfig.model_fields),
    }
)
"""Fields that may change between the parts of a resumed run; every other field is the run's identity."""
