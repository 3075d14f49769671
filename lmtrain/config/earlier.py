"""Configurations that earlier versions stored with a run: fields that are gone, and values that are now written out."""

from typing import Any

REMOVED: dict[str, tuple[object, str]] = {
    "data.sources": (None, "a run is trained on one corpus: put the texts into one folder and name it in data.source"),
    "data.deduplicate": (False, "remove repeated documents from the text before it is imported"),
    "model.embedding_dropout": (0.0, "it made no measurable difference; use model.input_dropout"),
    "model.output_bias": (True, "every model has one, which costs next to nothing"),
    "train.adversarial_softmax": (0.0, "it made no measurable difference"),
    "train.embedding_weight_decay": (None, "it made no measurable difference; use train.weight_decay"),
    "train.eval_epochs": (None, "use train.eval_steps, or neither: evaluations are then spread over the budget"),
    "train.scheduled_sampling": (0.0, "it made perplexity worse; lmtrain.nn.seq2seq has it for sequence to sequence"),
    "eval.dynamic_decay": (0.0, "zero was best for every model that was measured"),
    "eval.dynamic_lr": (1e-4, "use eval.dynamic_rate, which is relative to the size of the weights"),
    "eval.dynamic_embedding": (0.1, "eval.dynamic_rate is enough: it is relative to the size of the weights"),
    "eval.dynamic_rule": ("rms", "steps without this scaling made the measured model worse"),
    "train.spike_sigmas": (None, "a step whose gradient is not finite is skipped without it"),
}
"""Fields that were removed: the default value, and why, or what replaces the field."""

OPEN_BPE_SIZE = 16_384
"""The size of a bpe vocabulary that earlier versions left unset."""


def upgrade(values: dict[str, Any], *, stored: bool) -> None:
    """Delete from `values` the removed fields that are at their default.

    In a `stored` configuration a removed field may have any value, and the size of a bpe vocabulary is written out.
    Otherwise one with another value stays, and is later rejected with the reason.
    """
    for key, (default, _) in REMOVED.items():
        section, _, field = key.partition(".")
        fields = values.get(section)
        if isinstance(fields, dict) and field in fields and (stored or fields[field] == default):
            del fields[field]
    tokenizer = values.get("tokenizer")
    if (
        stored
        and isinstance(tokenizer, dict)
        and [tokenizer.get(field) for field in ("kind", "vocab_size", "file")] == ["bpe", None, None]
    ):
        tokenizer["vocab_size"] = OPEN_BPE_SIZE
