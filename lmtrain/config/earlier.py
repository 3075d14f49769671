"""Configurations that earlier versions stored with a run: fields that are gone, and values that are now written out."""

from typing import Any

from lmtrain.config.mistakes import Origins, shown
from lmtrain.errors import UsageError

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
    "eval.dynamic_rule": ("rms", "steps that it does not scale made the model that was measured worse"),
    "train.spike_sigmas": (None, "a step whose gradient is not finite is left out without it"),
}
"""Fields that were removed: the default value, and why, or what replaces the field."""

ONCE_NULL = ("eval.dynamic_lr", "eval.dynamic_embedding")
"""Fields that may be null, which means the default."""


def upgrade(values: Any, origin: str, origins: Origins, *, stored: bool) -> Any:
    """Return a copy of `values` in the present form; `origin` and `origins` are those of `loader.parse`.

    Raises UsageError if a removed field is set by an override or a variable, or is not at its default. In a `stored`
    configuration it may have any value.
    """
    if not isinstance(values, dict):
        return values
    values = {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in values.items()}
    for key, (default, reason) in REMOVED.items():
        section, _, field = key.partition(".")
        fields = values.get(section)
        if isinstance(fields, dict) and field in fields:
            value, place = fields.pop(field), origins.get((section, field))
            if place is not None or (value != default and not stored):
                raise UsageError(f"{place or origin}: {key}={shown(value)}: the field was removed: {reason}")
    for key in ONCE_NULL:
        section, _, field = key.partition(".")
        fields = values.get(section)
        if isinstance(fields, dict) and fields.get(field, 0) is None:
            del fields[field]
    return values
