"""Non-autoregressive decoding: one pass for all positions, losses against loops, and where the texts end."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.non_autoregressive import Length, NonAutoregressive
from tests.nn import translation
from tests.nn.translation import END, KINDS, LENGTHS, SOURCE, TARGET, TARGET_LENGTHS, VALID

CONFIG = replace(translation.CONFIG, max_length=6)


def make(length: Length, *, copy: bool = False) -> NonAutoregressive:
    torch.manual_seed(0)
    return NonAutoregressive(replace(CONFIG, copy=copy), length).eval()


def table(model: NonAutoregressive, row: int, positions: int) -> Tensor:
    """log p (T, V) of one source without padding, by the model's parts, without a target."""
    source = SOURCE[row : row + 1, : LENGTHS[row]]
    memory, valid = model.encoder(source)
    inputs = model.begin.words.weight + model.begin.sinusoids[:positions]
    states, _ = model.decoder(inputs.unsqueeze(0), memory, valid)
    log_probs: Tensor = model.prediction(states, memory, source, valid)[0]
    return log_probs


def length_log_probs(model: NonAutoregressive, row: int) -> Tensor:
    """log p (N + 1,) of the lengths, by a mean over the memory of one source without padding."""
    assert model.length_classifier is not None
    memory = model.encoder(SOURCE[row : row + 1, : LENGTHS[row]])[0][0]
    logits: Tensor = model.length_classifier(sum(memory) / LENGTHS[row])
    return logits.log_softmax(-1)


@pytest.mark.parametrize("cross_attention", KINDS)
def test_all_texts_may_be_empty(cross_attention: type[CrossAttention]) -> None:
    model = NonAutoregressive(replace(CONFIG, cross_attention=cross_attention)).eval()
    assert model.length_classifier is not None
    nn.init.zeros_(model.length_classifier.weight)
    model.length_classifier.bias.data[0] = 9.0
    words, lengths = model.decode(SOURCE, VALID)
    assert (words.shape, lengths.tolist()) == ((3, 0), [0, 0, 0])
    expected = -model.length_classifier.bias.log_softmax(0)[0].item()
    assert model.loss(SOURCE, TARGET[:, :0], VALID).item() == pytest.approx(expected)


def test_it_computes_in_the_type_of_its_weights() -> None:
    model = make("predicted", copy=True)
    loss, (words, _) = model.loss(SOURCE, TARGET), model.decode(SOURCE)
    precise = model.double().loss(SOURCE, TARGET)
    assert precise.dtype == torch.float64
    assert precise.item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.equal(model.decode(SOURCE)[0], words)


@pytest.mark.parametrize("lengths", [TARGET_LENGTHS, (0, 0, 0)])
@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("length", ["predicted", "fixed"])
def test_loss_equals_a_loop(length: Length, copy: bool, lengths: tuple[int, ...]) -> None:
    model = make(length, copy=copy)
    words: list[float] = []
    counts: list[float] = []
    for row, count in enumerate(lengths):
        labels = TARGET[row, :count].tolist() + ([END] * (6 - count) if length == "fixed" else [])
        log_probs = table(model, row, len(labels))
        words += [-log_probs[t, label].item() for t, label in enumerate(labels)]
        counts += [-length_log_probs(model, row)[count].item()] if length == "predicted" else [0.0]
    loss = model.loss(SOURCE, TARGET[:, : max(lengths)], VALID, torch.tensor(lengths))
    assert loss.item() == pytest.approx(math.fsum(words) / max(1, len(words)) + math.fsum(counts) / 3, abs=1e-5)
    with pytest.raises(ValueError, match="max_length=6"):
        model.loss(SOURCE, TARGET.repeat(1, 2), VALID)


@pytest.mark.parametrize("length", ["predicted", "fixed"])
def test_decoding_takes_the_most_likely_length_and_word_of_each_position(length: Length) -> None:
    model = make(length)
    bias = model.prediction.vocabulary.bias.data
    bias -= table(model, 0, 6).mean(0).detach()  # no word is likely everywhere
    bias[END] = -100.0
    if model.length_classifier is not None:
        model.length_classifier.weight.data.mul_(10)
    words, lengths = model.decode(SOURCE, VALID)
    for row in range(3):
        assert lengths[row] == (length_log_probs(model, row).argmax() if length == "predicted" else 6)
        assert words[row, : lengths[row]].tolist() == table(model, row, int(lengths[row]))[:, :6].argmax(-1).tolist()
        assert (words[row, lengths[row] :] == END).all()
    assert len(set(words[1, : lengths[1]].tolist())) > 1


def test_what_is_decoded_is_cut_at_the_first_end_and_has_no_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("fixed")
    likeliest = torch.tensor([[1, 2, END, 3, END, 4], [END, 1, 1, 1, 1, 1], [0, 0, CONFIG.begin_id, 0, 0, 0]])
    monkeypatch.setattr(model.prediction, "forward", lambda *_: torch.nn.functional.one_hot(likeliest, 7).float())
    words, lengths = model.decode(SOURCE, VALID)
    assert words.tolist() == [[1, 2, END, END, END, END], [END] * 6, [0] * 6]
    assert lengths.tolist() == [2, 0, 6]


@pytest.mark.parametrize("length", ["predicted", "fixed"])
def test_chosen_lengths_give_that_many_positions_and_no_other(length: Length) -> None:
    model = make(length)
    model.prediction.vocabulary.bias.data[END] = -100.0
    chosen = torch.tensor([3, 0, 6])
    words, lengths = model.decode(SOURCE, VALID, lengths=chosen)
    assert torch.equal(lengths, chosen)
    for row, count in enumerate(chosen.tolist()):
        assert words[row].tolist() == table(model, row, count)[:, :6].argmax(-1).tolist() + [END] * (6 - count)
    own = model.decode(SOURCE, VALID)
    again = model.decode(SOURCE, VALID, lengths=own[1])
    assert torch.equal(own[0], again[0])
    assert torch.equal(own[1], again[1])
    with pytest.raises(ValueError, match="max_length=6"):
        model.decode(SOURCE, VALID, lengths=torch.tensor([3, 7, 0]))


def test_cross_weights_attend_to_the_source_only() -> None:
    model = make("predicted")
    positions = torch.arange(4) < torch.tensor(TARGET_LENGTHS).unsqueeze(-1)
    _, weights = model(SOURCE, positions, VALID)
    assert weights.shape == (2, 3, 2, 4, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 2, 4))
    assert weights[..., ~VALID[1]][:, 1].abs().max() == 0
    for row, length in enumerate(TARGET_LENGTHS):  # neither padding nor absent positions have an influence
        _, alone = model(SOURCE[row : row + 1, : LENGTHS[row]], positions[row : row + 1, :length])
        torch.testing.assert_close(weights[:, row, :, :length, : LENGTHS[row]], alone[:, 0])
