"""The `train` section of a configuration: the optimisation, its budget and its cadence."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lmtrain.config.base import Place, Rate, Section


class TrainConfig(Section):
    """The optimisation, its budget and its cadence."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic of the forward and backward pass; weights stay in float32. `auto`: bf16 where the hardware has it,
    else fp16 on a GPU and fp32 on a CPU."""
    compile: Literal["auto"] | bool = "auto"
    """torch.compile; `auto` compiles when the run is long enough to earn it back."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads; None = the physical cores. Part of what makes a run repeatable bit for bit."""

    parallel: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several processes, started by torchrun, train one model. `ddp`: each has all of it; `fsdp`: each has a share;
    `auto`: `ddp` where weights, gradients and optimizer fill less than half of the device. Without effect on one."""
    timeout_minutes: float = Field(10.0, gt=0)
    """Minutes that processes wait for one of them that does not answer, before all end."""
    activation_checkpointing: bool = False
    """Keep no activations inside a block for the backward pass and compute them again: less memory, the same bits, a
    third more time at most."""

    batch_size: int = Field(32, ge=1)
    """Windows per optimizer step, of all processes together."""
    micro_batch: int | None = Field(None, ge=1)
    """Windows per forward pass; gradients are accumulated up to `batch_size`. None = a process's share of the batch."""
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    """Targets whose logits exist at once, for less memory. None = all of a forward pass; `auto` = all up to 1 GiB of
    float32 logits, beyond that a sixteenth of the targets and at least 512."""
    steps: int | None = Field(None, ge=1)
    """Budget in optimizer steps. With no budget of any kind the run takes 10 epochs."""
    epochs: float | None = Field(None, gt=0)
    """Budget in passes over the training tokens."""
    max_minutes: float | None = Field(None, gt=0)
    """Budget in minutes of wall-clock time, compiling included. The schedule then follows the clock too, from the first
    step on."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon for the matrices of the blocks and the pool, AdamW for all else, at one learning rate."""
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; `wsd` is warm-up, stable, then linear decay."""
    warmup: Rate = 0.02
    """Share of the run over which the learning rate rises from zero."""
    decay: float = Field(0.2, gt=0, le=1)
    """Share of the run over which `wsd` decays; at most what `warmup` leaves."""
    final_lr: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms, biases and slopes have none."""
    embedding_weight_decay: float | None = Field(None, ge=0)
    """Weight decay of the embedding; None = `weight_decay`."""
    beta1: Rate = 0.9
    """Decay of the mean of the gradient; `muon` has its own for the matrices, 0.95."""
    beta2: Rate = 0.95
    """Decay of the mean of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of that mean."""
    clip: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient; None = no clipping."""
    token_noise: Rate = 0.0
    """Share of the input tokens that are replaced by draws from all training tokens, while the targets stay (Xie et
    al., 2017)."""
    init_from: Place | None = None
    """A trained run, with whose best weights this one begins in place of random ones; it must have the same tokenizer
    and the same model, up to dropout and, but for learned positions, `context`."""
    teacher: Place | None = None
    """A trained run, whose best checkpoint's predictions are learned beside the text; it must have the same tokenizer,
    mode, and no shorter a context. The logits of all targets then exist at once, whatever `loss_chunk`."""
    teacher_weight: float = Field(0.5, gt=0, le=1)
    """Their share of the loss: 1 = learn from them alone."""
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
        if self.schedule == "wsd" and self.warmup + self.decay > 1 + 1e-9:
            raise ValueError(
                f"train.warmup={self.warmup} and train.decay={self.decay} are together more than the whole run, and "
                "train.schedule=wsd would have to do both at once: lower one of them"
            )
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            raise ValueError(
                f"train.batch_size={self.batch_size} can't be divided into train.micro_batch={self.micro_batch}"
            )
        return self
