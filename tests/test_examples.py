"""The examples, for a few steps: they learn, their results follow from the definitions, and a picture is written."""

import json
import math
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import facts
import largest
import patterns
import positions
import pytest
import sequences
from PIL import Image


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Call an example's `main`, with some of its constants replaced; the results that it printed, after checking
    what it drew."""

    def call(example: ModuleType, *arguments: str, **constants: object) -> dict[str, Any]:
        for constant, value in constants.items():
            monkeypatch.setattr(example, constant, value)
        monkeypatch.setattr(sys, "argv", ["example", *arguments])
        monkeypatch.chdir(tmp_path)
        example.main()
        results: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert all(math.isfinite(value) for value in results.values() if isinstance(value, float))
        with Image.open(results["picture"]) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 300
            assert len(picture.convert("RGB").getcolors(2**24) or ()) > 50
        return results

    return call


def test_largest_learns_to_point_and_to_regress(run: Any) -> None:
    """Without residuals it learns to regress first, and to point later."""
    residual, plain, queries = run(largest, "--steps", "50")["rows"]
    for row in (residual, queries):
        assert 0 < row["chance_accuracy"] < 0.1
        assert row["pointing_accuracy"] > 0.7
        assert row["regression_mse"] < 0.4 * row["mean_mse"]
    assert plain["regression_mse"] < 0.7 * plain["mean_mse"]


def test_positions_deviate_by_rounding_only(run: Any) -> None:
    deviations = [value for name, value in run(positions).items() if name.endswith("_deviation")]
    assert len(deviations) == 7
    assert all(0 <= deviation < 1e-5 for deviation in deviations)


def test_patterns_have_the_shares_of_their_definitions(run: Any) -> None:
    rows = {row["pattern"]: (row["share"], row["share_causal"]) for row in run(patterns)["rows"]}
    pairs = 32 * 32
    assert rows["full"] == (1, 32 * 33 / 2 / pairs)
    assert rows["local"] == ((32 * 7 - 2 * (1 + 2 + 3)) / pairs, (32 * 4 - (1 + 2 + 3)) / pairs)
    assert rows["strided"][0] == (4 * 5 * 5 + 2 * 6 * 6) / pairs  # 32 positions leave 5 or 6 of each of 6 remainders
    assert rows["global"] == ((pairs - 30 * 30) / pairs, (1 + 2 * 31) / pairs)
    for name in ("local + strided", "local + global"):
        for causal in (0, 1):
            parts = [rows[part][causal] for part in name.split(" + ")]
            assert max(parts) < rows[name][causal] < sum(parts)


def test_sequences_learn_and_report(run: Any) -> None:
    rows = run(sequences, "--steps", "8", UNSEEN=4)["rows"]
    assert [row["model"] for row in rows] == list(sequences.MODELS)
    assert all(row["last_loss"] < 0.95 * row["first_loss"] and 0 <= row["exact_match"] <= 1 for row in rows)


def test_sequences_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    some, valid, lengths = sequences.draw(4)
    right = [row[:length] for row, length in zip(some.tolist(), lengths.tolist(), strict=True)]
    wrong = [right[0], right[1][:-1], [*right[2], 0], [(right[3][0] + 1) % 10, *right[3][1:]]]
    monkeypatch.setattr(sequences, "decode", lambda *_: wrong)
    assert sequences.exact_match(Mock(), some, valid) == 0.25


def test_facts_learn_and_report(run: Any) -> None:
    results = run(facts, "--steps", "12", PAIRS=64, UNSEEN=4)
    assert results["last_loss"] < 0.95 * results["first_loss"]
    assert {"exact_match_known", "exact_match_new"} <= results.keys()


def test_pairs_of_paragraphs_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PAIRS", 100)
    monkeypatch.setattr(facts, "UNSEEN", 20)
    known, new, training = facts.split(seed=1)
    assert (len(known), len(new), len(training)) == (20, 20, 100)
    for pair in (*known, *new, *training):
        assert all(name.endswith(":") for name in pair.target[::2])
        assert set(pair.target[1::2]) <= set(pair.source)
    assert all(facts.NEW & {*pair.source} for pair in new)
    assert not any(facts.NEW & {*pair.source} for pair in (*known, *training))
    assert not {*known} & {*training}
    renamed = facts.rename(new[0], random.Random(0))
    changed = [pair for pair in zip(new[0].source, renamed.source, strict=True) if pair[0] != pair[1]]
    assert facts.NEW & {*new[0].source} <= {before for before, _ in changed} <= {*facts.NAMES}
    assert {after for _, after in changed} <= {*facts.KNOWN}
    monkeypatch.setattr(facts, "decode", lambda *_: [new[0].target, new[1].target[:-1], (*new[2].target, "a"), ()])
    assert facts.exact_match(Mock(), new[:4], {}) == 0.25
