"""From a prompt to text: what the model reads, where a text ends, and what is shown of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.data.tokenizer import Tokenizer
from lmtrain.inference import complete, unseen_words
from lmtrain.nn.language_model import LanguageModel
from lmtrain.nn.state import State, WindowedState
from lmtrain.schema import ModelConfig, TokenizerConfig

LINES = [" = Title = ", " ", " a b <unk> a b ", " ", " = = Part = = ", " b a "]
WORDS = Tokenizer.train(LINES, TokenizerConfig())
BYTES = Tokenizer.train([], TokenizerConfig(kind="byte"))


class Script(LanguageModel):
    """Says the tokens of a script, one after another, whatever it reads."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(ModelConfig(context=8, dim=4, heads=1, layers=0), tokenizer.vocab_size)
        self.script = [*tokenizer.encode(text), tokenizer.eos_id]
        self.read: list[int] = []
        self.place = 0

    def start(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        self.read, self.place = tokens[0].tolist(), 0
        return self._say(), WindowedState(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        self.place += 1
        return self._say(), state

    def _say(self) -> Tensor:
        scores = torch.full((1, self.vocab_size), -9.0)
        scores[0, self.script[self.place]] = -0.1
        return scores


def said(model: Script, tokenizer: Tokenizer, prompt: str, **options: Any) -> tuple[str, bool]:
    (completion,) = complete(model, tokenizer, prompt, **{"max_tokens": 12, **options})
    return completion.text, completion.hypothesis.finished


def test_the_model_reads_eos_and_the_end_of_the_prompt() -> None:
    model = Script(WORDS, "a b a b a b a b a b a b a b")
    said(model, WORDS, "a b")
    assert model.read == [WORDS.eos_id, *WORDS.encode("a b")]
    said(model, WORDS, "a b " * 10)
    assert model.read == WORDS.encode("a b " * 4)
    said(model, WORDS, "")
    assert model.read == [WORDS.eos_id]


def test_text_ends_where_it_is_told_to() -> None:
    model = Script(WORDS, "a b\n\n= = Part = =\nb\n= Title = a b a b a b")
    assert said(model, WORDS, "b", max_tokens=4) == (" a b\n\n", False)
    assert said(model, WORDS, "b", stop="line") == (" a b\n", True)
    assert said(model, WORDS, "b", stop="document", max_tokens=40) == (" a b\n\n= = Part = =\nb\n", True)


def test_byte_level_documents_end_at_eos_and_lines_at_a_newline() -> None:
    model = Script(BYTES, "é\nx")
    assert said(model, BYTES, "", stop="line") == ("é\n", True)
    assert said(model, BYTES, "caf", stop="document") == ("é\nx", True)


def test_unknown_is_produced_only_when_asked_for() -> None:
    model = Script(WORDS, "<unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk>")
    assert "<unk>" not in said(model, WORDS, "a")[0]
    assert said(model, WORDS, "a", allow_unknown=True, max_tokens=2)[0] == " <unk> <unk>"


def test_unseen_words_are_named() -> None:
    assert unseen_words(WORDS, "a xyzzy <unk> b <eos>") == ["xyzzy", "<eos>"]
    assert unseen_words(BYTES, "anything") == []


@pytest.mark.parametrize("mode", ["causal", "windowed"])
def test_a_wider_beam_finds_texts_at_least_as_likely_with_exact_scores(mode: str) -> None:
    torch.manual_seed(3)
    config = ModelConfig(mode=mode, context=6, dim=8, layers=1, heads=2)
    model = LanguageModel(config, WORDS.vocab_size).eval()
    (greedy,) = complete(model, WORDS, "a b", max_tokens=5)
    found = complete(model, WORDS, "a b", max_tokens=5, beams=300, results=4)
    assert found[0].hypothesis.score >= greedy.hypothesis.score - 1e-6
    for completion in found:
        ids, total = [WORDS.eos_id, *WORDS.encode("a b")], 0.0
        for token in completion.hypothesis.ids:
            if len(ids) > 6:  # the cache was full: the last half of the context, the new token among it
                ids = ids[-(3 if mode == "causal" else 6) :]
            log_probs, _ = model.start(torch.tensor([ids]))
            total += float(log_probs[0, token])
            ids.append(token)
        assert completion.hypothesis.score == pytest.approx(total, abs=1e-4)
