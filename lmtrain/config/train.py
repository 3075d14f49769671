"""The `train` section of a configuration."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from lmtrain.config.base import Fraction, Section, UserPath, listed

BUDGETS = ("steps", "epochs", "tokens")
"""The fields that give the budget as a number of steps; a run has at most one of them."""


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

    parallel: Literal["ddp", "fsdp"] = "ddp"
    """How processes started by torchrun share a model. `ddp`: replicas; `fsdp`: shards, for models too large for one
    device."""
    activation_checkpointing: bool = False
    """Recompute a block's activations in the backward pass: less memory, more time, the same bits unless compiled."""

    batch_size: int = Field(32, ge=1)
    """Sequences of `context` tokens per optimizer step, over all processes."""
    micro_batch: int | None = Field(None, ge=1)
    """Sequences per forward pass; gradients are accumulated up to `batch_size`. null = `batch_size` / number of
    processes."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Targets whose logits exist at the same time; fewer save memory. null = all; `auto` = all up to 1 GiB of float32
    logits, else a sixteenth but at least 512."""
    steps: int | None = Field(None, ge=1)
    """Budget in optimizer steps. With no budget set: 10 epochs, or 10 minutes if no configuration is given."""
    epochs: float | None = Field(None, gt=0)
    """Budget in passes over the training tokens; each pass skips fewer than two sequences."""
    tokens: int | None = Field(None, ge=1)
    """Budget in predicted tokens (one per sequence in a windowed model), rounded up to a whole step."""
    max_minutes: float | None = Field(None, gt=0)
    """Budget in minutes of wall-clock time, including compilation. The schedule then follows the clock too."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of all layers but embedding and output, AdamW for the rest; both use `lr`."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate. Word embeddings, and an untied output layer, of width E have `lr` / sqrt(E); norms and the
    token shift have 5 `lr`."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warmup; `wsd` is warmup, stable, linear decay. With `constant` a run can be resumed with
    a larger budget in steps, epochs or tokens."""
    warmup: float = Field(0.02, ge=0)
    """Linear warmup of the learning rate: a fraction of the run or, if 1 or more, a number of steps."""
    decay: float = Field(0.2, gt=0, le=1)
    """Fraction of the run over which `wsd` decays."""
    final_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak; the rate itself is at least 0.001 of the peak."""
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
    """Unigram noise (Xie et al., 2017): fraction of the input tokens that are replaced by random training tokens;
    targets are unchanged."""
    init_from: UserPath | None = None
    """Start from the best weights of another run. Without a configuration file its tokenizer and model are used;
    otherwise both must match, except for dropout and, unless positions are learned or attention is `linformer`,
    `context`."""
    teacher: Annotated[tuple[UserPath, ...], BeforeValidator(listed)] = ()
    """Distill from the best checkpoint of another run, or from the mean of the predictions of several. They must have
    the same tokenizer and mode and at least this `context`. All logits are then computed at once, regardless of
    `loss_chunk`."""
    teacher_weight: float = Field(0.5, gt=0, le=1)
    """Weight of the distillation loss; 1 = learn only from the teacher."""
    ema: Fraction | None = None
    """Decay of an exponential moving average (EMA) of the weights, which evaluations use and checkpoints also store; in
    the first steps at most (1 + step) / (10 + step). null = none."""

    log_steps: int = Field(10, ge=1)
    """Steps between two logged points; the first step is logged too."""
    eval_steps: int | None = Field(None, ge=1)
    """Steps between two evaluations. null = at each twentieth of the budget, or less often, so that they take at
    most about a tenth of the training time. The end of a run is always evaluated."""
    eval_tokens: int | None = Field(None, ge=1)
    """Validation tokens per evaluation during training; null = all. The final score always uses all."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row without a new best score; null = never."""
    save_minutes: float = Field(5.0, gt=0)
    """Minutes between two checkpoints; each evaluation also saves one."""
    keep: int = Field(2, ge=1)
    """Latest checkpoints to keep, besides the best one."""
    sample_prompts: tuple[str, ...] = ("The",)
    """Prompts that are continued for TensorBoard at each evaluation."""
    sample_tokens: int = Field(40, ge=1, le=1000)
    """Tokens of each of these continuations."""

    @property
    def micro_batch_size(self) -> int:
        """`micro_batch` or, if that is null, `batch_size`."""
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
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"train.batch_size={self.batch_size} is not divisible by train.micro_batch={self.micro_batch}"
            )
        return self
