"""The schema of a configuration: every field with its meaning and bounds, and the rejected combinations."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from lmtrain.config.base import Fraction, Section, UserPath, listed
from lmtrain.config.train import BUDGETS, TrainConfig

RUN_NAME = r"\A\w[\w.-]*\Z"
MIN_BPE_SIZE = 257
"""The smallest byte-level vocabulary: 256 bytes and `<eos>`."""
DROPOUT_FIELDS = ("dropout", "attention_dropout", "input_dropout", "output_dropout")
"""The fields of a model that do not change what its weights predict."""


Width = Annotated[int, Field(ge=1, le=2**20)]


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
    """Revision of the hub dataset; null = the latest one at the first download, or for `wikitext-*` a pinned one."""
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
                "data.source is a URL, which lmtrain does not download: download the file and give its path, or "
                "name a hub dataset as owner/name"
            )
        return self


class TokenizerConfig(Section):
    """How text becomes token ids."""

    kind: Literal["word", "bpe", "byte"] = "bpe"
    """Whole words with `<unk>`, for a text in which spaces surround punctuation, as in WikiText; byte-level BPE; or
    bytes."""
    vocab_size: int | None = Field(None, ge=4, le=1_000_000)
    """Maximum number of entries. null = every word of the training split, or for bpe a size that suits it; that of byte
    is fixed."""
    file: UserPath | None = None
    """Use this tokenizer.json (of a run, a token store or any published model) instead of training one; `kind` and
    `vocab_size` then have no effect."""
    eos_token: str | None = Field(None, min_length=1)
    """The token of `file` that ends each document. null = a common one such as `<|endoftext|>` or `</s>`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.file is not None:
            return self
        if self.eos_token is not None:
            raise ValueError("tokenizer.eos_token is a token of tokenizer.file: give the file, or set it to null")
        if self.kind == "byte" and self.vocab_size is not None:
            raise ValueError("tokenizer.vocab_size has no meaning with tokenizer.kind=byte: set it to null")
        if self.kind == "bpe" and self.vocab_size is not None and self.vocab_size < MIN_BPE_SIZE:
            raise ValueError(
                f"tokenizer.vocab_size must be at least {MIN_BPE_SIZE} with tokenizer.kind=bpe: 256 bytes and <eos>"
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
    """`full`; `local`, `strided`, `global` or a union of these (`local+global`); `compressed` or `linear`; if windowed,
    also `linformer` or `induced`. A list has one for each layer."""
    attention_window: int = Field(32, ge=1)
    """`local`: attend to tokens fewer than this many positions away."""
    attention_stride: int = Field(8, ge=1)
    """`strided`: attend to tokens at multiples of this distance."""
    attention_globals: int = Field(4, ge=1)
    """`global`: this many learned tokens before the sequence, to which all tokens attend and which, if windowed, attend
    to all tokens."""
    compression: int = Field(4, ge=2)
    """`compressed`: tokens per compressed key."""
    projected_length: int = Field(32, ge=1)
    """`linformer`: number of projected keys."""
    inducing_points: int = Field(16, ge=1)
    """`induced`: number of inducing points."""
    qk_norm: bool = False
    """Apply RMSNorm to the queries and keys of each head."""
    token_shift: bool = False
    """Add the previous token's embedding, times a learned gain for each feature, to that of each token."""
    position: Literal["sinusoidal", "learned", "rotary", "alibi", "none"] = "rotary"
    """Position encoding of the encoder blocks."""
    pool_query: Literal["seed", "recency"] = "recency"
    """`seed`: one learned query vector per head. `recency`: also a learned slope per head, by which older positions
    count less."""
    pool_residual: Literal["seed", "state"] = "state"
    """What the pooled value is added to: the learned query, or the encoder's output at the last position."""
    copy: bool = False  # type: ignore[assignment]
    """Mix a pointer over the tokens of the context into the prediction (pointer-generator)."""
    output: Literal["softmax", "adaptive"] = "softmax"
    """`adaptive`: adaptive softmax, which predicts the cluster of a rare word, then the word; training computes fewer
    logits."""
    output_cutoffs: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """`adaptive`: the token ids at which the clusters begin; lower ids are the shortlist. null = a sixteenth and a
    quarter of the vocabulary."""
    tie_embeddings: bool = True
    """Share the embedding with the output layer."""
    dropout: Fraction = 0.0
    """Dropout on the output of every sublayer."""
    attention_dropout: Fraction = 0.0
    """Dropout on attention weights; no effect with `linear` attention."""
    input_dropout: Fraction = 0.0
    """Variational dropout on the embedded input: one mask for all positions of a sequence."""
    output_dropout: Fraction = 0.0
    """Variational dropout on the input of the output layer: one mask for all positions of a sequence."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"model.dim={self.dim} is not divisible by model.heads={self.heads}")
        if self.position == "rotary" and (width := self.dim // self.heads) % 2:
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
    def targets(self) -> int:
        """How many tokens a window predicts: one per position, or only the one after it."""
        return 1 if self.mode == "windowed" else self.context

    @property
    def global_tokens(self) -> int:
        """How many learned tokens come before the sequence: none, unless a layer has global attention."""
        return self.attention_globals if any("global" in kind.split("+") for kind in self.layer_attention) else 0

    def _check_attention(self) -> None:
        if len(self.layer_attention) != self.layers:
            raise ValueError(f"model.attention names {len(self.attention)} layers, and model.layers={self.layers}")
        for name in listed(self.attention):
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


class EvalConfig(Section):
    """How perplexity is measured."""

    stride: int | None = Field(None, ge=1)
    """Tokens scored per window; the other tokens are context. null = a quarter of the context, or 1 if windowed."""
    batch_size: int = Field(32, ge=1)
    """Windows per forward pass; changes speed and rounding only."""
    temperature: float = Field(1.0, gt=0.0, le=100.0)
    """Divides the log-probabilities in `lmtrain eval`; those of the pointer of `model.copy` are unchanged."""
    cache_weight: Fraction = 0.1
    """`--cache`: weight of the cache in the prediction."""
    cache_theta: float = Field(20.0, ge=0.0)
    """`--cache`: multiplies the cosine similarity of two states, before the softmax over earlier ones."""
    cache_window: int = Field(8_000, ge=1)
    """`--cache`: number of tokens in the cache."""
    dynamic_rate: float = Field(5e-4, ge=0.0)
    """`--dynamic`: learning rate, relative to the root mean square of a parameter's weights."""


class Config(Section):
    """Everything that defines a run."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()

    @property
    def targets_per_step(self) -> int:
        """The number of predictions per optimizer step, which a budget in tokens counts."""
        return self.train.batch_size * self.model.targets

    @property
    def stride(self) -> int:
        """`eval.stride` or its default, a quarter of the targets of a window."""
        return self.eval.stride or max(1, self.model.targets // 4)

    def with_fields(self, **sections: Mapping[str, Any]) -> Self:
        """Return the configuration with these fields in its sections. They are not validated."""
        changed = {name: getattr(self, name).model_copy(update=fields) for name, fields in sections.items()}
        return self.model_copy(update=changed)

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
        # The contents of data and tokenizer are compared by hashes.
        *(f"{section}.{field}" for section in ("data", "tokenizer", "eval") for field in SECTIONS[section]),
        "train.device",
        "train.compile",
        "train.threads",
        "train.parallel",
        "train.activation_checkpointing",
        "train.micro_batch",
        "train.loss_chunk",
        "train.log_steps",
        "train.save_minutes",
        "train.keep",
        "train.teacher",  # its checkpoint is compared by a hash
        "train.sample_prompts",
        "train.sample_tokens",
    }
)
"""Fields that may change when a run is resumed; all others are the identity of the run."""
BUDGET_FIELDS = frozenset(f"train.{field}" for field in BUDGETS)
"""Fields that may also change if the learning rate is constant."""
