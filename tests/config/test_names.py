"""Unknown names: which field is meant, and what it is."""

import pytest

from lmtrain.config.fields import fields
from lmtrain.config.loader import flat, load
from lmtrain.config.names import ALIASES
from lmtrain.config.schema import Config
from lmtrain.errors import UsageError
from tests.helpers import Lmtrain


def test_every_alias_means_one_field_and_is_not_itself_a_field() -> None:
    known = flat(Config())
    aliases = [alias for names in ALIASES.values() for alias in names.split()]
    assert known.keys() >= ALIASES.keys()
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & {key.partition(".")[2] for key in known}


def question(*names: str) -> str:
    """The question whether these fields are meant, each with the first sentence of its description."""
    sentences = {field.name: field.description.partition(". ")[0].removesuffix(".") for field in fields()}
    return f"; did you mean {' or '.join(f'{name} ({sentences[name]})' for name in names)}?"


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("train.learning_rate=3e-4", "; did you mean train.lr (Peak learning rate)?"),
        ("lr=3e-4", question("train.lr")),
        (
            "min_lr=1e-5",
            "; did you mean train.final_lr (Learning rate at the end, as a fraction of the peak; the rate itself is at "
            "least 0.001 of the peak)?",
        ),
        ("n-layer=6", question("model.layers")),
        ("train.seed=3", question("run.seed")),
        ("model.batch_size=8", question("train.batch_size", "eval.batch_size")),
        ("model.dimm=64", question("model.dim")),
        ("model.droput=0.1", question("model.dropout")),
        ("modell.dim=64", "; did you mean model?"),
        ("train.batch_sise=8", question("train.batch_size")),
        ("model=5", "in the environment; `lmtrain train --fields model` lists the fields of model"),
        ("data=book.txt", question("data.source")),
        ("train.zzz=1", "; `lmtrain train --fields train` lists the fields of train"),
        ("foo.bar=1", "; the sections are run, data, tokenizer, model, train, eval"),
    ],
)
def test_the_answer_is_the_field_that_is_meant(override: str, answer: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(None, [override], {})
    assert str(caught.value).endswith(answer)


def test_a_field_without_its_section_is_not_a_source(lmtrain: Lmtrain) -> None:
    for command in ("train", "tokenize", "download"):
        rejected = lmtrain(command, "lr=3e-4")
        assert rejected.code == 2
        assert rejected.err.endswith("did you mean train.lr (Peak learning rate)?\n")
