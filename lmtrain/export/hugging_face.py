"""A run's checkpoint as a folder that Hugging Face's transformers loads, by the classes of `modeling_lmtrain.py`."""

import json
from pathlib import Path
from typing import Any

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.export.model_card import model_card
from lmtrain.model.trained import TrainedWeights, trained_weights
from lmtrain.storage.files import new_folder
from lmtrain.storage.run_folder import TOKENIZER
from lmtrain.storage.tensor_files import serialize
from lmtrain.system import disk

FORMAT = "lmtrain-export/1"
MODELING = "modeling_lmtrain"
"""The module with the classes for transformers; that of the folder imports them from the one here."""


def export(run_dir: Path, folder: Path, which: str | None, weights: str) -> TrainedWeights:
    """Write the checkpoint that `trained_weights` finds to `folder`, and return it.

    Raises LmtrainError as `trained_weights` does, for a windowed model, and if `folder` exists.
    """
    if folder.exists():
        raise LmtrainError(f"{folder} exists: remove it, or name another folder")
    trained = trained_weights(run_dir, which, weights)
    if trained.config.model.mode != "causal":
        raise LmtrainError(
            f"{run_dir} is a windowed model, which predicts one token per window: a causal language model of "
            "transformers predicts one at every position, so only a run with model.mode=causal can be exported"
        )
    with new_folder(folder, FORMAT, {"step": trained.info["step"], "weights": trained.weights}) as temporary:
        tensors = {f"model.{name}": stored[...] for name, stored in trained.tensors.items()}
        disk.write(temporary / "model.safetensors", serialize(tensors))
        code = f"from lmtrain.export.{MODELING} import LmtrainConfig, LmtrainForCausalLM\n"
        disk.write(temporary / f"{MODELING}.py", code.encode())
        unknown = trained.tokenizer.unk_id
        blocked = {} if unknown is None else {"suppress_tokens": [unknown]}  # lmtrain never generates an unknown word
        documents: dict[str, dict[str, Any]] = {
            "config.json": _config(trained),
            "generation_config.json": {**_token_ids(trained.tokenizer), **blocked},
            TOKENIZER: _tokenizer(json.loads((run_dir / TOKENIZER).read_bytes()), trained.tokenizer),
            "tokenizer_config.json": _tokenizer_config(trained),
        }
        for name, document in documents.items():
            disk.write(temporary / name, (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())
        disk.write(temporary / "README.md", model_card(trained, folder.name).encode())
    return trained


def _config(trained: TrainedWeights) -> dict[str, Any]:
    model, tokenizer = trained.config.model, trained.tokenizer
    return {
        "architectures": ["LmtrainForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODELING}.LmtrainConfig",
            "AutoModelForCausalLM": f"{MODELING}.LmtrainForCausalLM",
        },
        "model_type": "lmtrain",
        "model": model.model_dump(mode="json"),
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": model.context,
        "hidden_size": model.dim,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "tie_word_embeddings": model.tie_embeddings,
        "dtype": "float32",
        **_token_ids(tokenizer),
    }


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens: `<eos>` stands for an empty prompt, ends a text, and pads."""
    return dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.eos_id)


def _tokenizer(document: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the run's tokenizer.json, changed to encode a text to what the model reads of it as a prompt.

    An empty text has no tokens, except with a word tokenizer.
    In lmtrain, the code encodes each line separately and, with a word tokenizer, adds `<eos>`; here tokenizer.json does
    both.
    """
    changed = {
        **dict.fromkeys(("truncation", "padding", "post_processor")),
        "model": {name: None if name == "dropout" else value for name, value in document["model"].items()},
    }
    if tokenizer.kind == "word":  # its normalizer turns a line end into `<eos>`
        eos = tokenizer.eos_token
        before, text = {"SpecialToken": {"id": eos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        changed["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [before, text],
            "pair": [before, text, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {eos: {"id": eos, "ids": [tokenizer.eos_id], "tokens": [eos]}},
        }
        return {**document, **changed, "decoder": _word_decoder(eos)}
    lines = {"type": "Split", "pattern": {"String": "\n"}, "behavior": "MergedWithPrevious", "invert": False}
    parts = [part for part in (lines, document.get("pre_tokenizer")) if part is not None]
    return {**document, **changed, "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts}}


def _word_decoder(eos: str) -> dict[str, Any]:
    """Return a decoder that joins words by spaces and turns `<eos>` into a line end.

    The library joins decoded tokens without spaces, but its WordPiece decoder puts a space before every token that does
    not begin with the prefix. No word begins with the prefix chosen here.
    """
    line_end = {"type": "Replace", "pattern": {"Regex": f" ?(?<![^ ]){eos}(?![^ ]) ?"}, "content": "\n"}
    return {
        "type": "Sequence",
        "decoders": [{"type": "WordPiece", "prefix": "\n", "cleanup": False}, {"type": "Fuse"}, line_end],
    }


def _tokenizer_config(trained: TrainedWeights) -> dict[str, Any]:
    tokenizer = trained.tokenizer
    unknown = {} if tokenizer.unk_token is None else {"unk_token": tokenizer.unk_token}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.eos_token),
        **unknown,
        "split_special_tokens": True,  # `<eos>` in a text is text
        "model_max_length": trained.config.model.context,
        "padding_side": "left",
        "truncation_side": "left",
        "clean_up_tokenization_spaces": False,
    }
