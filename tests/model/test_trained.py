"""The members of an ensemble are loaded as single runs are, and must fit each other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.run_store import check_same_corpus
from lmtrain.model.ensemble import Ensemble
from lmtrain.model.trained import build_predictor, load_weights
from tests.helpers import CPU
from tests.training.helpers import LOGGED, change, run


def load(*runs: Path) -> Any:
    return load_weights(runs, "best", "auto")


@pytest.fixture(scope="module")
def first(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("members") / "first"
    run(change(tiny, **LOGGED), folder)
    return folder


def test_members_may_differ_in_size_and_are_loaded_in_order(tiny: Config, first: Path, tmp_path: Path) -> None:
    run(change(tiny, **LOGGED, model__heads=1, model__copy=True, run__seed=2), tmp_path / "other")
    found = load(tmp_path / "other", first)
    assert [one.run_dir.name for one in found] == ["other", "first"]
    ensemble, alone = build_predictor(found, CPU), build_predictor(load(first), CPU)
    assert isinstance(ensemble, Ensemble)
    weights = zip(ensemble.members[1].parameters(), alone.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    check_same_corpus(found)


def test_a_run_without_ema_weights_has_only_its_own(tiny: Config, tmp_path: Path) -> None:
    run(change(tiny, **LOGGED, train__ema=None), tmp_path / "plain")
    assert load(tmp_path / "plain")[0].weights == "raw"
    with pytest.raises(LmtrainError, match="has no EMA weights: use --weights raw, or train with"):
        load_weights([tmp_path / "plain"], None, "ema")


@pytest.mark.parametrize(("name", "value"), [("mode", "windowed"), ("context", 8)])
def test_another_mode_or_context_is_rejected(
    tiny: Config, first: Path, tmp_path: Path, name: str, value: object
) -> None:
    fields = LOGGED | {f"model__{name}": value, "eval__stride": 1}
    run(change(tiny, **fields), tmp_path / "other")
    message = rf"other has model\.{name}={value}, and \S*first \w+: leave one of them out, or train it again with"
    with pytest.raises(LmtrainError, match=message):
        load(first, tmp_path / "other")


def test_another_tokenizer_and_another_corpus_are_rejected(tiny: Config, first: Path, tmp_path: Path) -> None:
    config = change(tiny, **LOGGED, tokenizer__kind="byte")
    run(config, tmp_path / "other")
    remedy = rf"train it again with tokenizer\.file={first}/tokenizer\.json"
    with pytest.raises(LmtrainError, match=f"have different tokenizers, .* {remedy}"):
        load(first, tmp_path / "other")
    alone = [load(folder)[0] for folder in (first, tmp_path / "other")]
    remedy = "leave one of them out, or score a file with --text and without --dynamic"
    with pytest.raises(LmtrainError, match=rf"trained on different corpora, .* {remedy}"):
        check_same_corpus(alone)
    # Of runs of earlier versions only their own kind of hash is known.
    old = [replace(one, info={"tokens": name}) for one, name in zip(alone, "ab", strict=True)]
    check_same_corpus([old[0], old[0]])
    for other in (old[1], alone[0]):
        with pytest.raises(LmtrainError, match="trained on different corpora"):
            check_same_corpus([old[0], other])
