"""Prompts to texts: what the model reads, that a batch changes nothing, and what is reported about each text."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmtrain.config.schema import TokenizerConfig
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.generation.complete import PromptCompletions, complete
from lmtrain.generation.options import Options
from lmtrain.model.ensemble import Ensemble, Predictor
from tests.data.published import as_given
from tests.generation.models import NUMBERED, Script, random_model

LINES = [" = Title = ", " ", " a b <unk> a b ", " ", " = = Part = = ", " b a "]
WORDS = Tokenizer.train(LINES, TokenizerConfig(kind="word"))
BPE = Tokenizer.train(LINES, TokenizerConfig(kind="bpe", vocab_size=270))
BYTE = Tokenizer.train([], TokenizerConfig(kind="byte"))
PROMPTS = ["w1", "", "w2 w3 w4 w5 w6 w7 w8 w9 w10 w11", "w1 w2 w1 w2 w1", "w40\n", "w7 w7 w7 w7 w7 w7"]
SEARCHES = {
    "greedy": Options(),
    "beams": Options(beams=4, results=3, length_penalty=0.7),
    "sampling": Options(temperature=1.3, top_p=0.9, repetition_penalty=1.2, seed=5),
    "best of many": Options(
        temperature=1.0, top_k=20, samples=4, results=2, length_penalty=1.0, repetition_penalty=1.5
    ),
}


def said(model: Script, prompt: str, **options: Any) -> tuple[str, str]:
    ((completion,),) = (
        done.completions for done in complete(model, WORDS, [prompt], Options(**{"max_tokens": 12, **options}))
    )
    return completion.text, completion.reason


def assert_same_texts(found: list[PromptCompletions], expected: list[PromptCompletions]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.prompt == other.prompt
        assert [text.ids for text in one.completions] == [text.ids for text in other.completions]
        for text, same in zip(one.completions, other.completions, strict=True):
            assert (text.text, text.reason, text.tokens) == (same.text, same.reason, same.tokens)
            assert text.token_log_probs == pytest.approx(same.token_log_probs, rel=1e-5, abs=5e-5)
            assert text.score == pytest.approx(same.score, abs=1e-4)


def test_the_model_reads_eos_and_the_end_of_the_prompt() -> None:
    model = Script(WORDS, "a b a b a b a b a b a b a b")
    said(model, "a b")
    assert model.read == [WORDS.eos_id, *WORDS.encode("a b")]
    said(model, "a b " * 10)
    assert model.read == WORDS.encode("a b " * 4)
    said(model, "")
    assert model.read == [WORDS.eos_id]


@pytest.mark.parametrize("tokenizer", [BPE, BYTE, as_given("llama2")])
def test_a_prompt_of_other_tokens_is_read_as_it_is(tokenizer: Tokenizer) -> None:
    """A model that has read one document has never read what follows `<eos>`."""
    model = Script(tokenizer, "a b a b a b")
    for prompt in ("a b", ""):
        complete(model, tokenizer, [prompt], Options(max_tokens=2))
        assert model.read == (tokenizer.encode(prompt) or [tokenizer.eos_id])


def test_a_plain_prompt_is_read_in_the_spacing_of_the_corpus() -> None:
    tokenizer = Tokenizer.train(["a , b @-@ c . ( )"], TokenizerConfig(kind="word"))
    model = Script(tokenizer, "a b a b a b a b")
    (done,) = complete(model, tokenizer, ["(a, b-c)."], Options(max_tokens=2))
    assert model.read == tokenizer.encode("( a , b @-@ c ) .")
    assert (done.prompt, done.completions[0].text) == ("(a, b-c).", " a b")


def test_text_ends_by_its_stop_rule() -> None:
    model = Script(WORDS, "a b\n\n= = Part = =\nb\n= Title = a b a b a b")
    assert said(model, "b", max_tokens=4) == (" a b\n\n", "length")
    assert said(model, "b", stop="line") == (" a b\n", "line")
    assert said(model, "b", stop_strings=("Part =", "xyz")) == (" a b\n\n= = ", "stop string 'Part ='")


def test_unknown_is_never_generated() -> None:
    assert "<unk>" not in said(Script(WORDS, "<unk> " * 12), "a")[0]


def model_of(mode: str) -> Predictor:
    if mode == "ensemble":
        return Ensemble([random_model("causal", NUMBERED), random_model("causal", NUMBERED, seed=4)])
    return random_model(mode, NUMBERED)


@pytest.mark.parametrize("mode", ["causal", "windowed", "ensemble"])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_batch_equals_its_prompts(mode: str, name: str) -> None:
    model, options = model_of(mode), replace(SEARCHES[name], max_tokens=20, stop="line")
    together = complete(model, NUMBERED, PROMPTS, options)
    alone = [complete(model, NUMBERED, [prompt], options, first=number)[0] for number, prompt in enumerate(PROMPTS)]
    assert_same_texts(together, alone)
    assert len({text.completions[0].ids for text in together}) > 2
    assert complete(model, NUMBERED, [], options) == []


def test_the_speed_counts_all_generated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=2.0)
    monkeypatch.setattr("lmtrain.generation.complete.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options = Options(max_tokens=7, temperature=1.0, samples=3, results=1)
    done = complete(random_model("causal", NUMBERED), NUMBERED, ["w1", "w2"], options)
    assert [one.tokens_per_second for one in done] == [2 * 3 * 7 / 2.0] * 2


def test_a_sample_depends_on_the_seed_the_prompt_and_its_number() -> None:
    model = random_model("causal", NUMBERED)
    options = Options(max_tokens=9, temperature=2.0, samples=3, results=3)
    one, same, other = (complete(model, NUMBERED, ["w1", "w1"], replace(options, seed=seed)) for seed in (0, 0, 1))
    texts = [text.ids for done in one for text in done.completions]
    assert texts == [text.ids for done in same for text in done.completions]
    assert len(set(texts)) == 6
    assert not set(texts) & {text.ids for done in other for text in done.completions}
    fewer = complete(model, NUMBERED, ["w1"], replace(options, samples=2, results=2))[0]
    assert {text.ids for text in fewer.completions} < set(texts[:3])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_the_best_samples_come_first(length_penalty: float) -> None:
    model = random_model("causal", NUMBERED)
    options = Options(
        max_tokens=30, temperature=1.0, samples=8, results=8, length_penalty=length_penalty, stop_strings=("3", "5")
    )
    (all_of_them,) = complete(model, NUMBERED, ["w1"], options)
    scores = [text.score for text in all_of_them.completions]
    assert scores == sorted(scores, reverse=True)
    assert len({len(text.ids) for text in all_of_them.completions}) > 1
    for text in all_of_them.completions:
        assert text.log_prob == pytest.approx(sum(text.token_log_probs))
        assert text.score == pytest.approx(text.log_prob / len(text.ids) ** length_penalty)
    (best,) = complete(model, NUMBERED, ["w1"], replace(options, results=2))
    assert [text.ids for text in best.completions] == [text.ids for text in all_of_them.completions[:2]]


@pytest.mark.parametrize("mode", ["causal", "windowed"])
@pytest.mark.parametrize("search", ["greedy", "beams", "sampling"])
def test_log_probabilities_are_those_of_the_text_read_again(mode: str, search: str) -> None:
    model = random_model(mode, WORDS)
    for completion in complete(model, WORDS, ["a b"], replace(SEARCHES[search], max_tokens=14))[0].completions:
        ids = [WORDS.eos_id, *WORDS.encode("a b")]
        for token, log_prob in zip(completion.ids, completion.token_log_probs, strict=True):
            if len(ids) > 6:  # the context is full: its last half, the new token among it
                ids = ids[-(3 if mode == "causal" else 6) :]
            log_probs, _ = model.start(torch.tensor([ids]))
            assert log_prob == pytest.approx(float(log_probs[0, token]), abs=1e-4)
            ids.append(token)


WITH_BEAMS = {"samples": 2, "temperature": 1.0, "top_p": 0.9, "top_k": 3, "results": 3}
CONTRADICTIONS: list[dict[str, Any]] = [
    *({"temperature": value} for value in (-0.1, 1e-7, math.nan)),
    *({"stop_strings": value} for value in ("end", ("a", ""))),
    *({name: 2} for name in ("samples", "results")),
    *({"beams": 2, name: value} for name, value in WITH_BEAMS.items()),
]


@pytest.mark.parametrize("options", CONTRADICTIONS, ids=str)
def test_contradictions_and_numbers_out_of_their_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"\n{list(options)[-1]}[.\n]|error, ({list(options)[-1]}=|beam search)"):
        Options(**options)


def test_the_penalty_is_for_the_whole_prompt_also_beyond_the_context() -> None:
    options = Options(max_tokens=1, repetition_penalty=1000.0)
    (done,) = complete(Script(NUMBERED, "w1"), NUMBERED, ["w1 " + "w2 " * 20], options)
    assert done.completions[0].tokens != ("w1",)


def test_the_numbers_of_prompt_and_sample_are_not_run_together() -> None:
    model, options = random_model("causal", NUMBERED), Options(max_tokens=20, temperature=2.0, samples=12)
    one, other = (complete(model, NUMBERED, ["w1"], options, first=first)[0] for first in (1, 11))
    assert not {text.ids for text in one.completions} & {text.ids for text in other.completions}
