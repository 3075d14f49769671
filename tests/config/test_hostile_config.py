"""Hostile configurations: odd values of every field, and files that once crashed or stalled the reader."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.config import loader as config
from lmtrain.config import yaml_values
from lmtrain.config.schema import Config
from lmtrain.errors import LmtrainError
from tests.hostile import ODD_VALUES


@pytest.mark.parametrize("key", config.flat(Config()))
def test_odd_values_of_a_field_are_accepted_or_rejected(key: str, tmp_path: Path) -> None:
    section, _, field = key.partition(".")
    more = [1, 2.0, "1e-3", "true", "null", "a: b", "\u2028\x85\ufeff", ["full", 1], 1e308, -1e308, int("1" * 4000, 16)]
    path, sentences = tmp_path / "config.yaml", []
    for value in [*ODD_VALUES, *more]:
        try:
            accepted = config.parse({section: {field: value}}, "values")
        except LmtrainError as error:
            sentences.append(str(error))
        else:
            path.write_text(config.dump(accepted), encoding="utf-8")
            assert config.load(path, environment={}) == accepted
    assert all(sentence.startswith("values: ") and len(sentence) < 1_000 for sentence in sentences)


TEXTS = st.text() | st.from_regex(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", fullmatch=True)


@given(TEXTS, st.lists(TEXTS, min_size=4, max_size=4))
@settings(max_examples=25, derandomize=True, deadline=None, database=None)
def test_any_text_survives_being_written_and_read(text: str, more: list[str]) -> None:
    loaded = Config.model_validate({"data": {"text_column": text}, "train": {"sample_prompts": [text, *more]}})
    assert config.parse(yaml_values.read(config.dump(loaded), "copy"), "copy") == loaded


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("run: {seed: !!int 5}", "no aliases .* and tags"),
        ("run: {? [a] : 1}", "found unhashable key"),
        ("run: {seed: " + "9" * 5000 + "}", "should be a finite number"),
        ("train: {lr: " + "1:" * 200 + "0.5}", "train.lr='1:1:1.*should be a valid number"),
        ("model: {dim: 0x" + "f" * 5000 + "}", "model.dim=a number too long to write"),
        ("train: {steps: 9999999999999999}", "train.steps=.*larger than 2\\*\\*40"),
        ("train: {epochs: 1.0e+300}", "train.epochs=.*larger than 2\\*\\*40"),
        ('run: {dir: "a\\0b"}', "run.dir=.*: holds a character that no path can"),
        ('data: {dir: "a\\ud800b"}', "data.dir=.*: holds a character that no path can"),
        ("model: {layers: 1000000000}", "model.layers=1000000000"),
        ("\n".join(f"k{number}: 1" for number in range(5_000)), "and 4995 more like these"),
        ("#" * (config.LARGEST_FILE + 1), "larger than 256 KiB"),
    ],
    ids=range(12),
)
def test_configurations_that_once_crashed_or_stalled(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(LmtrainError, match=message) as caught:
        config.load(path, environment={})
    assert len(str(caught.value)) < 2_000
