"""An exported model in transformers computes, and generates, what lmtrain does."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from lmtrain.config.schema import ModelConfig
from lmtrain.export.hugging_face import export
from lmtrain.export.modeling_lmtrain import LmtrainConfig, LmtrainForCausalLM
from lmtrain.generation.beam import beam_search
from lmtrain.generation.options import Options
from lmtrain.generation.sampling import sample
from lmtrain.generation.search import Hypothesis, never
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.trained import build_trained, trained_weights
from tests.data.helpers import LINES, TRAINED
from tests.export.runs import CONTEXT, stored_run
from tests.generation.toy import ends_with
from tests.helpers import CPU
from tests.model.models import OWN_CACHE, PLAIN, VARIANTS

WORDS = TRAINED["word"]
BLOCKED = [WORDS.encode("<unk>")[0]]
KINDS = ("full", "local+strided", *OWN_CACHE)
SOME = [fields for fields in VARIANTS if fields.get("attention", "full") in KINDS] + PLAIN[:1]
"""Every kind of cache, pointer, output and embedding."""


def both(tmp_path: Path, **fields: Any) -> tuple[LanguageModel, LmtrainForCausalLM]:
    """The model of a run as lmtrain loads it, and as transformers loads its export."""
    run_dir = stored_run(tmp_path / "run", **fields)
    export(run_dir, tmp_path / "hf", None, "auto")
    ours = build_trained(trained_weights(run_dir, None, "auto"), CPU)
    return ours, LmtrainForCausalLM.from_pretrained(tmp_path / "hf")


def words(*shape: int) -> Tensor:
    """Random words of the vocabulary."""
    return torch.randint(2, WORDS.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def padded(lengths: list[int], columns: int, side: str) -> tuple[Tensor, Tensor]:
    """Rows of random words, and their attention mask."""
    tokens, mask = words(len(lengths), columns), torch.zeros(len(lengths), columns, dtype=torch.long)
    for row, length in zip(mask, lengths, strict=True):
        row[columns - length if side == "left" else 0 :][:length] = 1
    return tokens * mask + WORDS.eos_id * (1 - mask), mask


CACHE = fields(CausalLMOutputWithPast)[2].name
"""What this version of transformers calls the cache."""


@pytest.mark.parametrize("fields", [*VARIANTS, *PLAIN, {"tie_embeddings": False}, {"norm": "scale"}], ids=str)
def test_logits_are_the_log_probabilities_of_lmtrain(tmp_path: Path, fields: dict[str, object]) -> None:
    ours, theirs = both(tmp_path, **fields)
    with torch.no_grad():
        torch.testing.assert_close(theirs(words(3, CONTEXT)).logits, ours.predict(words(3, CONTEXT)))
        for side in ("left", "right"):
            tokens, mask = padded([CONTEXT - 2, 1, CONTEXT, 5], CONTEXT, side)
            found = theirs(tokens, attention_mask=mask).logits
            for row, logits, valid in zip(tokens, found, mask.bool(), strict=True):
                expected = ours.predict(row[valid].unsqueeze(0)).squeeze(0)
                torch.testing.assert_close(logits[valid], expected, atol=1e-5, rtol=1e-6)


def test_labels_give_the_mean_loss_and_its_gradients(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, copy=True)
    tokens = words(3, CONTEXT)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=torch.Generator().manual_seed(2)) < 0.3, -100)
    found = theirs(tokens, labels=labels).loss
    counted = labels[:, 1:] != -100
    expected = ours(tokens[:, :-1], tokens[:, 1:])[counted].mean()
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    for name, parameter in ours.named_parameters():
        gradient = theirs.model.get_parameter(name).grad
        assert parameter.grad is not None
        assert gradient is not None
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_cache_gives_the_logits_of_a_pass_without_one(tmp_path: Path) -> None:
    _, theirs = both(tmp_path, copy=True, attention="compressed")
    tokens, mask = padded([4, CONTEXT - 1], CONTEXT - 1, "left")
    with torch.no_grad():
        whole = theirs(tokens, attention_mask=mask)
        assert CACHE not in whole
        first = theirs(tokens, attention_mask=mask, use_cache=True)
        torch.testing.assert_close(first.logits, whole.logits)
        for name in ("cache", "past_key_values"):
            head = theirs(tokens[1:, :6], use_cache=True, logits_to_keep=1)
            assert head[CACHE].get_seq_length() == 6
            rest = theirs(tokens[1:, 6:], **{name: head[CACHE]})
            assert rest[CACHE].get_seq_length() == CONTEXT - 1
            found = torch.cat((head.logits, rest.logits), dim=1)
            torch.testing.assert_close(found, whole.logits[1:, 5:], atol=1e-5, rtol=1e-6)
        kept = theirs(tokens, attention_mask=mask, logits_to_keep=torch.tensor([3, -1])).logits
        torch.testing.assert_close(kept, whole.logits[:, [3, -1]])
        wide = torch.cat((torch.ones_like(mask), mask), dim=1)  # that of a longer text, whose end these tokens are
        assert torch.equal(theirs(tokens, attention_mask=wide).logits, whole.logits)


def generated(theirs: LmtrainForCausalLM, tokens: Tensor, mask: Tensor, **options: Any) -> list[list[int]]:
    """What `generate` adds to each row, up to the first `<eos>` where that ends texts."""
    found = theirs.generate(tokens, attention_mask=mask, do_sample=False, **options)
    texts: list[list[int]] = found[:, tokens.shape[1] :].tolist()
    if theirs.generation_config.eos_token_id is None:
        return texts
    return [text[: text.index(WORDS.eos_id) + 1] if WORDS.eos_id in text else text for text in texts]


def ids(texts: list[Hypothesis]) -> list[list[int]]:
    return [list(text.ids) for text in texts]


@pytest.mark.parametrize(("fields", "eos"), [(SOME[0], True), *((fields, False) for fields in SOME)], ids=str)
def test_greedy_search_is_that_of_lmtrain_far_beyond_the_context(
    tmp_path: Path, fields: dict[str, object], eos: bool
) -> None:
    ours, theirs = both(tmp_path, **fields)
    if not eos:
        theirs.generation_config.eos_token_id = None
    for columns in (5, 2 * CONTEXT):  # of the longer prompts, the last `context` tokens are read
        tokens, mask = padded([columns, 1, 3], columns, "left")
        start, options = ours.start(tokens, mask.bool()), Options(max_tokens=40)
        is_end = ends_with(WORDS.eos_id) if eos else never
        expected = ids(sample(*start, ours.step, options, is_end=is_end, blocked=BLOCKED))
        assert generated(theirs, tokens, mask, max_new_tokens=40) == expected
        assert eos or {len(text) for text in expected} == {40}
        assert len({tuple(text) for text in expected}) > 1


def test_generation_without_a_cache_is_the_same_within_the_context(tmp_path: Path) -> None:
    _, theirs = both(tmp_path)
    tokens, mask = padded([5, 2], 5, "left")
    options = {"max_new_tokens": CONTEXT - 4, "do_sample": False}
    expected = theirs.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(theirs.generate(tokens, attention_mask=mask, use_cache=False, **options), expected)
    with pytest.raises(ValueError, match="13 tokens in a row: the model takes 1 to 12"):
        theirs.generate(tokens[:1], use_cache=False, max_new_tokens=9, min_new_tokens=9, do_sample=False)


@pytest.mark.parametrize("fields", SOME, ids=str)
def test_beam_search_for_texts_of_one_length_is_that_of_lmtrain(tmp_path: Path, fields: dict[str, object]) -> None:
    ours, theirs = both(tmp_path, **fields)
    theirs.generation_config.eos_token_id = None
    tokens, mask = padded([5, 2, 4], 5, "left")
    options = Options(max_tokens=20, beams=4, results=3)
    best = beam_search(*ours.start(tokens, mask.bool()), ours.step, options, blocked=BLOCKED)
    found = generated(theirs, tokens, mask, max_new_tokens=20, num_beams=4, num_return_sequences=3, length_penalty=0.0)
    assert found == [text for texts in best for text in ids(texts)]


def test_a_model_that_is_saved_and_loaded_again_is_the_same(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, position="sinusoidal")
    theirs.save_pretrained(tmp_path / "again")
    again = LmtrainForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(again(words(2, 9)).logits, ours.predict(words(2, 9)))
    assert isinstance(again.config, LmtrainConfig)
    assert ModelConfig.model_validate(again.config.model) == ours.config
    assert again.get_input_embeddings() is again.model.embedding


def test_what_cannot_be_computed_is_rejected(tmp_path: Path) -> None:
    _, theirs = both(tmp_path)
    tokens, mask = padded([3, 2], 3, "right")
    with pytest.raises(ValueError, match="pad on the left"):
        theirs.generate(tokens, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"model\.mode=windowed"):
        LmtrainForCausalLM(LmtrainConfig(model={"mode": "windowed"}))
    with pytest.raises(NotImplementedError, match="vocabulary of a fixed size"):
        theirs.resize_token_embeddings(WORDS.vocab_size + 1)
    assert theirs.get_input_embeddings().num_embeddings == theirs.config.vocab_size == WORDS.vocab_size


def test_the_card_says_how_to_load_a_model_and_to_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = stored_run(tmp_path / "run")
    export(run_dir, tmp_path / "hf/run", None, "auto")
    code = (tmp_path / "hf/run/README.md").read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path / "hf")
    names: dict[str, Any] = {}
    exec(code, names)
    assert set(capfd.readouterr().out.split()) <= {*"".join(LINES).split(), "<unk>"}
    assert type(names["model"]) is LmtrainForCausalLM
    assert names["inputs"]["input_ids"].tolist() == [[WORDS.eos_id, WORDS.unk_id]]
    assert names["texts"].shape[1] <= 52
    assert names["model"].generate(max_new_tokens=2)[0, 0] == WORDS.eos_id  # an empty prompt


def test_a_new_model_has_the_initial_weights_of_lmtrain() -> None:
    torch.manual_seed(5)
    theirs = LmtrainForCausalLM(LmtrainConfig(model={"dim": 16, "heads": 2, "layers": 1}, vocab_size=30))
    assert theirs.model.embedding.weight.std().item() == pytest.approx(1 / 16, rel=0.2)
    assert theirs.model.encoder.rotations is not None
    assert theirs.model.encoder.rotations[0, 0].eq(1).all()


def test_the_loss_is_per_item_of_the_whole_batch_and_of_all_positions(tmp_path: Path) -> None:
    _, theirs = both(tmp_path)
    tokens = words(3, CONTEXT)
    mean = theirs(tokens, labels=tokens).loss
    of_more = theirs(tokens, labels=tokens, num_items_in_batch=100).loss
    torch.testing.assert_close(of_more, mean * 3 * (CONTEXT - 1) / 100)
    torch.testing.assert_close(theirs(tokens, labels=tokens, use_cache=True, logits_to_keep=1).loss, mean)
