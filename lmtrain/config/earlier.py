"""Configurations that earlier versions stored with a run: fields and values that are gone."""

from typing import Any

REMOVED = {
    "data": ("sources", "deduplicate"),
    "model": ("embedding_dropout", "output_bias"),
    "train": (
        "adversarial_softmax",
        "embedding_weight_decay",
        "eval_epochs",
        "scheduled_sampling",
        "spike_sigmas",
        "timeout_minutes",
    ),
    "eval": ("dynamic_decay", "dynamic_lr", "dynamic_embedding", "dynamic_rule"),
}
"""Fields that were removed, by section."""

OPEN_BPE_SIZE = 16_384
"""The size of a bpe vocabulary that earlier versions left unset."""


def upgrade(values: dict[str, Any]) -> None:
    """Delete the removed fields from a stored configuration, and replace values that left a choice open."""
    for section, removed in REMOVED.items():
        fields = values.get(section)
        if isinstance(fields, dict):
            for field in removed:
                fields.pop(field, None)
    tokenizer, train = values.get("tokenizer"), values.get("train")
    if isinstance(tokenizer, dict) and tokenizer.get("kind") == "auto":  # only with a file, which has a kind of its own
        del tokenizer["kind"]
    if isinstance(tokenizer, dict) and tokenizer.get("kind") == "bpe" and tokenizer.get("file") is None:
        size = tokenizer.get("vocab_size")
        tokenizer["vocab_size"] = OPEN_BPE_SIZE if size is None else size
    if isinstance(train, dict) and train.get("parallel") == "auto":
        train["parallel"] = "ddp"
