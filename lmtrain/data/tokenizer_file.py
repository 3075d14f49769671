"""tokenizer.json: a Hugging Face file, written here, so that its bytes do not depend on the library's version.

Only a kind, a vocabulary and merges are read back; a file that specifies anything else is rejected.
"""

import json
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import pre_tokenizers

from lmtrain.errors import LmtrainError

Kind = Literal["word", "bpe", "byte"]
Merges = list[tuple[str, str]]

UNK, EOS = "<unk>", "<eos>"
MOST_BYTES = 64 << 20

_SPACE = r"\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
BYTE_SYMBOLS = sorted(pre_tokenizers.ByteLevel.alphabet())
"""The 256 characters that stand for bytes in a byte-level vocabulary."""


_DIRECT = {symbol: ord(symbol) for symbol in BYTE_SYMBOLS if ord(symbol) < 256}
BYTE = _DIRECT | dict(zip(BYTE_SYMBOLS[len(_DIRECT) :], sorted(set(range(256)) - set(_DIRECT.values())), strict=True))
"""The byte of each symbol: printable Latin-1 stands for itself, later symbols for the other bytes in order."""
BYTE_VOCABULARY = {EOS: 0} | {symbol: byte + 1 for symbol, byte in BYTE.items()}
_LITERAL_EOS = f"(?<![^{_SPACE}]){EOS}(?![^{_SPACE}])"
_WORD_PARTS = {
    "added_tokens": [],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Replace", "pattern": {"Regex": _LITERAL_EOS}, "content": UNK},
            {"type": "Replace", "pattern": {"String": "\n"}, "content": f" {EOS} "},
        ],
    },
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": f"[{_SPACE}]+"},
        "behavior": "Removed",
        "invert": False,
    },
}


def _byte_level(use_regex: bool) -> dict[str, Any]:
    options = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"added_tokens": [], "normalizer": None, "pre_tokenizer": options}


_PARTS: dict[Kind, dict[str, Any]] = {"word": _WORD_PARTS, "bpe": _byte_level(True), "byte": _byte_level(False)}
"""The parts of tokenizer.json other than the model, by which its kind is recognized, in the library's format.

`<eos>` is an entry of the vocabulary and not an added token, because added tokens are found in any text. With bpe no
merge can spell it: letters and brackets are never in one word."""
_BYTE_DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_BPE_OPTIONS = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
    "ignore_merges": False,
}


def content(kind: Kind, vocabulary: dict[str, int], merges: Merges) -> bytes:
    """The bytes of tokenizer.json."""
    ordered = dict(sorted(vocabulary.items(), key=lambda entry: entry[1]))
    model: dict[str, Any]
    if kind == "word":
        model = {"type": "WordLevel", "vocab": ordered, "unk_token": UNK}
    else:
        model = {"type": "BPE", **_BPE_OPTIONS, "vocab": ordered, "merges": merges}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        **_PARTS[kind],
        "post_processor": None,
        "decoder": None if kind == "word" else _BYTE_DECODER,
        "model": model,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def read(path: Path) -> tuple[Kind, dict[str, int], Merges, bytes]:
    """The kind, the vocabulary, the merges, and the file's bytes.

    Raises LmtrainError when it is missing, damaged, or not written by lmtrain.
    """
    found = _read(path)
    try:
        document = json.loads(found)
    except (ValueError, RecursionError):
        raise LmtrainError(f"tokenizer {path} is damaged: it is not JSON") from None
    kind = _kind_of(document)
    if kind is None:
        raise LmtrainError(f"tokenizer {path} is not one that lmtrain wrote: make it with 'lmtrain tokenize'")
    vocabulary, merges = document["model"].get("vocab"), document["model"].get("merges", [])
    if not _sound_vocabulary(kind, vocabulary) or not _sound_merges(kind, vocabulary, merges):
        raise LmtrainError(f"tokenizer {path} is damaged: its vocabulary or its merges don't fit together")
    return kind, vocabulary, [(left, right) for left, right in merges], found


def _read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise LmtrainError(f"tokenizer {path} does not exist: make it with 'lmtrain tokenize'")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise LmtrainError(f"tokenizer {path} can't be read: {error.strerror}") from None
    if len(content) > MOST_BYTES:
        raise LmtrainError(f"tokenizer {path} is larger than {MOST_BYTES >> 20} MiB: lmtrain did not write it")
    return content


def _kind_of(document: Any) -> Kind | None:
    """The kind of which `document` is a tokenizer.json, whatever its vocabulary and merges; None = foreign."""
    if not isinstance(document, dict) or not isinstance(document.get("model"), dict):
        return None
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        model_type = "WordLevel" if kind == "word" else "BPE"
        if document["model"].get("type") == model_type and _holds(document, _PARTS[kind]):
            return kind
    return None


def _holds(found: Any, ours: Any) -> bool:
    """Whether `found` contains all of `ours`; its objects may have more keys, such as a later library may write."""
    if isinstance(ours, dict):
        return isinstance(found, dict) and all(key in found and _holds(found[key], ours[key]) for key in ours)
    if isinstance(ours, list):
        return isinstance(found, list) and len(found) == len(ours) and all(map(_holds, found, ours))
    return type(found) is type(ours) and bool(found == ours)


def _sound_vocabulary(kind: Kind, vocabulary: Any) -> bool:
    """Whether `vocabulary` maps the tokens of this kind, each well formed, to the ids 0, 1, 2 and so on."""
    if not isinstance(vocabulary, dict) or any(type(index) is not int for index in vocabulary.values()):
        return False
    if sorted(vocabulary.values()) != list(range(len(vocabulary))):
        return False
    if kind == "byte":
        return vocabulary == BYTE_VOCABULARY
    if kind == "bpe":
        symbols = all(token == EOS or (token and BYTE.keys() >= set(token)) for token in vocabulary)
        return symbols and vocabulary.get(EOS) == 0 and vocabulary.keys() >= set(BYTE_SYMBOLS)
    try:
        "".join(vocabulary).encode()
    except UnicodeEncodeError:
        return False
    return vocabulary.get(UNK) == 0 and vocabulary.get(EOS) == 1 and all(word.split() == [word] for word in vocabulary)


def _sound_merges(kind: Kind, vocabulary: dict[str, int], merges: Any) -> bool:
    """Whether every merge joins two tokens of the vocabulary into a third one, which is not `<eos>`."""
    if not isinstance(merges, list) or (kind != "bpe" and merges):
        return False
    tokens = vocabulary.keys() - {EOS}
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(part, str) and part in tokens for part in pair)
        and pair[0] + pair[1] in tokens
        for pair in merges
    )
