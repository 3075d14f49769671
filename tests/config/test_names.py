"""Unknown names: what is meant, and the override that sets it."""

import pytest

from lmtrain.config.loader import flat, load
from lmtrain.config.names import ALIASES, REMARKS
from lmtrain.config.schema import Config
from lmtrain.errors import UsageError
from tests.helpers import Lmtrain


def test_every_alias_means_one_field_and_is_none_itself() -> None:
    known = flat(Config())
    aliases = [alias for names in ALIASES.values() for alias in names.split()]
    assert known.keys() >= ALIASES.keys()
    assert len(set(aliases)) == len(aliases)
    assert set(REMARKS) <= set(aliases)
    assert not set(aliases) & {key.partition(".")[2] for key in known}


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("train.learning_rate=3e-4", "did you mean train.lr=0.0003?"),
        ("lr=3e-4", "did you mean train.lr=3e-4?"),
        ("model.block_size=256", "did you mean model.context=256?"),
        ("n-layer=6", "did you mean model.layers=6?"),
        ("train.seed=3", "did you mean run.seed=3?"),
        ("model.batch_size=8", "did you mean train.batch_size=8 or eval.batch_size=8?"),
        ("tokenizer.type=bpe", "did you mean tokenizer.kind=bpe?"),
        ("train.max_steps=9", "did you mean train.steps=9?"),
        ("train.max_tokens=1e9", "did you mean train.tokens=1000000000.0?"),
        ("max_tokens=10_000_000", "did you mean train.tokens=10_000_000?"),
        ("train.warmup_steps=9", "did you mean train.warmup=9?"),
        ("model.dimm=64", "did you mean model.dim=64?"),
        ("model.droput=0.1", "did you mean model.dropout=0.1?"),
        ("modell.dim=64", "did you mean model?"),
        ("train.zzz=1", "; `lmtrain train --fields train` lists the fields of train"),
        ("foo.bar=1", "; the sections are run, data, tokenizer, model, train, eval"),
    ],
)
def test_the_answer_is_the_override_that_is_meant(override: str, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(None, [override], {})
    assert str(caught.value).endswith(answer)


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (["--lr", "3e-4"], "train.lr=3e-4"),
        (["--batch-size=8"], "train.batch_size=8 or eval.batch_size=8"),
        (["--model.dim", "128"], "model.dim=128"),
    ],
)
def test_an_option_of_another_program_is_answered_with_an_override(
    options: list[str], answer: str, lmtrain: Lmtrain
) -> None:
    rejected = lmtrain("train", *options)
    assert rejected.code == 2
    assert rejected.err.endswith(f"Fields are set without dashes: {answer}\n")


def test_a_misspelled_option_is_answered_with_the_option(lmtrain: Lmtrain) -> None:
    rejected = lmtrain("generate", "x", "--max_tokens", "5")
    assert (rejected.code, "--max-tokens" in rejected.err, "Fields" in rejected.err) == (2, True, False)


def test_a_field_without_its_section_is_no_source(lmtrain: Lmtrain) -> None:
    for command in ("train", "tokenize", "download"):
        rejected = lmtrain(command, "lr=3e-4")
        assert rejected.code == 2
        assert rejected.err.endswith("did you mean train.lr=3e-4?\n")
