"""The example of sequences, for a few steps in every mode; and that its data and its score are what they say."""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLES)
    spec = importlib.util.spec_from_file_location("sequences", EXAMPLES / "sequences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "UNSEEN", 32)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


@pytest.mark.parametrize("task", ["reverse", "copy"])
@pytest.mark.parametrize("decoding", ["autoregressive", "parallel"])
def test_a_few_steps(
    script: ModuleType, task: str, decoding: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--task", task, "--decoding", decoding, "--steps", "8", "--out", str(tmp_path / "new")]
    results = script.main(arguments)
    assert results["last_loss"] < 0.95 * results["first_loss"]
    assert all(math.isfinite(value) for value in results.values() if isinstance(value, float))
    assert 0 <= results["exact_match"] <= 1
    assert f'"task": "{task}", "decoding": "{decoding}"' in capsys.readouterr().out
    with Image.open(tmp_path / "new" / f"sequences-{task}-{decoding}.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 300
        assert len(picture.convert("RGB").getcolors(2**24) or ()) > 50


def test_targets_are_the_sources_reversed_or_copied(script: ModuleType) -> None:
    torch.manual_seed(0)
    for task, step in (("reverse", -1), ("copy", 1)):
        sequences = script.draw(task, 200)
        lengths = sequences.lengths.tolist()
        assert {min(lengths), max(lengths)} == {4, 16}
        for source, target, valid, length in zip(
            sequences.source.tolist(), sequences.target.tolist(), sequences.valid.tolist(), lengths, strict=True
        ):
            assert target[:length] == source[:length][::step]
            assert target[length:] == source[length:] == [0] * (16 - length)
            assert valid == [True] * length + [False] * (16 - length)


def test_keys_tell_sources_apart(script: ModuleType) -> None:
    torch.manual_seed(0)
    sequences = script.draw("copy", 20_000)  # of 10,000 of length 4 some come twice
    words = {
        tuple(row[:length]) for row, length in zip(sequences.source.tolist(), sequences.lengths.tolist(), strict=True)
    }
    assert len(words) < 20_000
    assert len(set(sequences.keys().tolist())) == len(words)


def test_nothing_unseen_is_trained_on(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a single symbol there are 13 sequences, all of them unseen: nothing is left to train on."""
    kept: list[int] = []
    rows = script.Sequences.rows

    def watch(sequences: object, index: torch.Tensor) -> object:
        kept.append(int(index.sum()) if index.dtype == torch.bool else -1)
        return rows(sequences, index)

    monkeypatch.setattr(script, "SYMBOLS", 1)
    monkeypatch.setattr(script, "UNSEEN", 500)
    monkeypatch.setattr(script.Sequences, "rows", watch)
    script.main(["--steps", "2", "--out", str(tmp_path)])
    assert kept == [0, 0, -1]


def test_exact_match_counts_whole_sequences(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sequences = script.draw("copy", 4)
    right = [row[:length] for row, length in zip(sequences.target.tolist(), sequences.lengths.tolist(), strict=True)]
    wrong = [right[0], right[1][:-1], [*right[2], 0], [(right[3][0] + 1) % 10, *right[3][1:]]]
    monkeypatch.setattr(script, "decode", lambda model, sequences: wrong)
    assert script.exact_match(None, sequences) == 0.25
