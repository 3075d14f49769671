"""From prompts to texts: what the model reads, that a batch changes nothing, and what is told about each text."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.config.schema import ModelConfig, TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.errors import LmtrainError
from lmtrain.generation.complete import Completed, as_json, complete
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import Sampling
from lmtrain.model.build import build_model
from lmtrain.model.decoding_state import State, WindowState
from lmtrain.model.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("one_thread")

LINES = [" = Title = ", " ", " a b <unk> a b ", " ", " = = Part = = ", " b a "]
WORDS = Tokenizer.train(LINES, TokenizerConfig())
BYTES = Tokenizer.train([], TokenizerConfig(kind="byte"))
MANY = Tokenizer.train([" ".join(f"w{number}" for number in range(60))], TokenizerConfig())
PROMPTS = ["w1", "", "w2 w3 w4 w5 w6 w7 w8 w9 w10 w11", "w1 w2 w1 w2 w1", "w40\n", "w7 w7 w7 w7 w7 w7"]
SEARCHES = {
    "greedy": Options(),
    "beams": Options(beams=4, results=3, alpha=0.7, min_tokens=2),
    "sampling": Options(sampling=Sampling(temperature=1.3, top_p=0.9, repetition_penalty=1.2), seed=5),
    "best of many": Options(sampling=Sampling(top_k=20), samples=4, results=2, alpha=1.0),
    "no repeats": Options(no_repeat=2, bias=(("w5", 3.0), ("w6", -2.0)), ban=("w1",)),
}


class Script(LanguageModel):
    """Says the tokens of a script, one after another, whatever it reads."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        super().__init__(ModelConfig(context=8, dim=4, heads=1, layers=0), tokenizer.vocab_size)
        self.script = [*tokenizer.encode(text), tokenizer.eos_id]
        self.read: list[int] = []
        self.place = 0

    def start(self, tokens: Tensor, valid: Tensor | None = None) -> tuple[Tensor, State]:
        self.read, self.place = tokens[0].tolist(), 0
        return self._say(), WindowState(tokens, torch.ones_like(tokens, dtype=torch.bool))

    def step(self, state: State, tokens: Tensor) -> tuple[Tensor, State]:
        self.place += 1
        return self._say(), state

    def _say(self) -> Tensor:
        scores = torch.full((1, self.vocab_size), -9.0)
        scores[0, self.script[self.place]] = -0.1
        return scores


def said(model: Script, tokenizer: Tokenizer, prompt: str, **options: Any) -> tuple[str, str]:
    ((completion,),) = (
        done.completions for done in complete(model, tokenizer, [prompt], Options(**{"max_tokens": 12, **options}))
    )
    return completion.text, completion.reason


def random_model(mode: str, tokenizer: Tokenizer, context: int = 6, seed: int = 3) -> LanguageModel:
    torch.manual_seed(seed)
    config = ModelConfig(mode=mode, context=context, dim=8, layers=1, heads=2)
    model = build_model(config, tokenizer.vocab_size)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)  # far from uniform, so that nothing hangs on rounding
    return model.eval()


def assert_same_texts(found: list[Completed], expected: list[Completed]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.prompt, one.shown) == (other.prompt, other.shown)
        assert [text.ids for text in one.completions] == [text.ids for text in other.completions]
        for text, same in zip(one.completions, other.completions, strict=True):
            assert (text.text, text.reason, text.tokens) == (same.text, same.reason, same.tokens)
            assert text.token_log_probs == pytest.approx(same.token_log_probs, abs=1e-5)
            assert text.score == pytest.approx(same.score, abs=1e-4)


def test_the_model_reads_eos_and_the_end_of_the_prompt() -> None:
    model = Script(WORDS, "a b a b a b a b a b a b a b")
    said(model, WORDS, "a b")
    assert model.read == [WORDS.eos_id, *WORDS.encode("a b")]
    said(model, WORDS, "a b " * 10)
    assert model.read == WORDS.encode("a b " * 4)
    said(model, WORDS, "")
    assert model.read == [WORDS.eos_id]


def test_a_plain_prompt_is_read_in_the_spacing_of_the_corpus() -> None:
    tokenizer = Tokenizer.train(["a , b @-@ c . ( )"], TokenizerConfig())
    model = Script(tokenizer, "a b a b a b a b")
    (done,) = complete(model, tokenizer, ["(a, b-c)."], Options(max_tokens=2))
    assert model.read == tokenizer.encode("( a , b @-@ c ) .")
    assert (done.prompt, done.shown, done.completions[0].text) == ("(a, b-c).", "(a, b-c).", " a b")
    complete(model, tokenizer, ["(a, b-c)."], Options(max_tokens=2, raw=True))
    assert model.read == [tokenizer.eos_id, *[tokenizer.unk_id] * 2]


def test_text_ends_where_it_is_told_to() -> None:
    model = Script(WORDS, "a b\n\n= = Part = =\nb\n= Title = a b a b a b")
    assert said(model, WORDS, "b", max_tokens=4) == (" a b\n\n", "length")
    assert said(model, WORDS, "b", stop="line") == (" a b\n", "line")
    assert said(model, WORDS, "b", stop="document", max_tokens=40) == (" a b\n\n= = Part = =\nb\n", "document")
    assert said(model, WORDS, "b", stop_strings=("Part =", "xyz")) == (" a b\n\n= = ", "stop string 'Part ='")
    assert said(model, WORDS, "b", stop_strings=("b", "\n"), min_tokens=3) == (" a b", "stop string '\\n'")


def test_byte_level_documents_end_at_eos_and_lines_at_a_newline() -> None:
    model = Script(BYTES, "é\nx")
    assert said(model, BYTES, "", stop="line") == ("é\n", "line")
    assert said(model, BYTES, "caf", stop="document") == ("é\nx", "document")
    assert said(model, BYTES, "", stop_strings=("é",)) == ("", "stop string 'é'")
    assert said(model, BYTES, "", max_tokens=1) == ("\N{REPLACEMENT CHARACTER}", "length")


def test_unknown_is_produced_only_when_asked_for() -> None:
    model = Script(WORDS, "<unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk> <unk>")
    assert "<unk>" not in said(model, WORDS, "a")[0]
    assert said(model, WORDS, "a", allow_unknown=True, max_tokens=2)[0] == " <unk> <unk>"


def test_words_are_banned_and_favoured() -> None:
    model = Script(WORDS, "a a a a a a a a a a a a")
    assert "a" not in said(model, WORDS, "b", ban=("a",))[0].split()
    assert said(model, WORDS, "b", bias=(("b", 9.0),), max_tokens=2)[0] == " b b"
    assert said(model, WORDS, "b", bias=(("b", 8.8),), max_tokens=2)[0] == " a a"


def test_where_nothing_may_follow_the_text_says_so() -> None:
    model = Script(WORDS, "a b a b a b a b a b")
    everything = ("a", "=", "Title", "Part", "\n")
    assert said(model, WORDS, "a", ban=everything, no_repeat=1) == (" b", "nothing allowed")


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_batch_gives_what_each_prompt_gives_alone(mode: str, name: str) -> None:
    model, options = random_model(mode, MANY), replace(SEARCHES[name], max_tokens=20, stop="line")
    together = complete(model, MANY, PROMPTS, options)
    alone = [complete(model, MANY, [prompt], options, first=number)[0] for number, prompt in enumerate(PROMPTS)]
    assert_same_texts(together, alone)
    assert len({text.completions[0].ids for text in together}) > 2
    assert complete(model, MANY, [], options) == []


def test_drawn_texts_follow_the_seed_the_prompt_and_the_draw() -> None:
    model = random_model("causal", MANY)
    options = Options(max_tokens=9, sampling=Sampling(temperature=2.0), samples=3, results=3)
    one, same, other = (complete(model, MANY, ["w1", "w1"], replace(options, seed=seed)) for seed in (0, 0, 1))
    texts = [text.ids for done in one for text in done.completions]
    assert texts == [text.ids for done in same for text in done.completions]
    assert len(set(texts)) == 6
    assert not set(texts) & {text.ids for done in other for text in done.completions}
    fewer = complete(model, MANY, ["w1"], replace(options, samples=2, results=2))[0]
    assert {text.ids for text in fewer.completions} < set(texts[:3])


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_best_of_the_drawn_texts_come_first(alpha: float) -> None:
    model = random_model("causal", MANY)
    options = Options(max_tokens=30, sampling=Sampling(), samples=8, results=8, alpha=alpha, stop_strings=("3", "5"))
    (all_of_them,) = complete(model, MANY, ["w1"], options)
    scores = [text.score for text in all_of_them.completions]
    assert scores == sorted(scores, reverse=True)
    assert len({len(text.ids) for text in all_of_them.completions}) > 1
    for text in all_of_them.completions:
        assert text.log_prob == pytest.approx(sum(text.token_log_probs))
        assert text.score == pytest.approx(text.log_prob / len(text.ids) ** alpha)
    (best,) = complete(model, MANY, ["w1"], replace(options, results=2))
    assert [text.ids for text in best.completions] == [text.ids for text in all_of_them.completions[:2]]


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("search", ["greedy", "beams", "sampling"])
def test_log_probabilities_are_those_of_the_text_read_anew(mode: str, search: str) -> None:
    model = random_model(mode, WORDS)
    for completion in complete(model, WORDS, ["a b"], replace(SEARCHES[search], max_tokens=14))[0].completions:
        ids = [WORDS.eos_id, *WORDS.encode("a b")]
        for token, log_prob in zip(completion.ids, completion.token_log_probs, strict=True):
            if len(ids) > 6:  # the context is full: its last half, the new token among it
                ids = ids[-(3 if mode == "causal" else 6) :]
            log_probs, _ = model.start(torch.tensor([ids]))
            assert log_prob == pytest.approx(float(log_probs[0, token]), abs=1e-4)
            ids.append(token)


def test_json_has_everything_as_plain_values() -> None:
    (done,) = complete(random_model("causal", MANY), MANY, ["w1"], Options(max_tokens=4))
    result = as_json(done)
    (completion,) = result["completions"]
    assert result["prompt"] == "w1"
    assert completion["tokens"] == tuple(MANY.token(index) for index in completion["ids"])
    assert completion["text"] == "".join(f" {token}" for token in completion["tokens"])
    assert {"token_log_probs", "log_prob", "score", "reason"} < set(completion)
    assert result["timings"]["first_token_seconds"] > 0
    assert result["timings"]["tokens_per_second"] > 0


CONTRADICTIONS: list[dict[str, Any]] = [
    {"beams": 2, "samples": 2},
    {"beams": 2, "sampling": Sampling()},
    {"samples": 2},
    {"results": 2},
    {"results": 0},
    {"beams": 2, "results": 3},
    {"stop_strings": ("a", "")},
    {"stop_strings": ("\ud800",)},
    {"alpha": float("nan")},
    {"alpha": 400.0},
    {"alpha": -400.0},
]


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=str)
def test_contradictions_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"samples=|results=|stop string|alpha=|beams >"):
        Options(**options)


def test_banning_every_word_is_refused() -> None:
    with pytest.raises(LmtrainError, match="every word"):
        said(Script(WORDS, "a"), WORDS, "a", ban=("a", "b", "=", "Title", "Part", "\n"))
