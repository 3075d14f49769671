"""Odd values of every field, and texts that must survive being written and read."""

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
    more = [1, 2.0, "1e-3", "true", "null", "a: b", "\u2028\x85\ufeff", ["full", 1], 1e308, -1e308]
    path, sentences = tmp_path / "config.yaml", []
    for value in [*ODD_VALUES, *more]:
        try:
            accepted = config.load({section: {field: value}}, environment={})
        except LmtrainError as error:
            sentences.append(str(error))
        else:
            path.write_text(config.dump(accepted), encoding="utf-8")
            assert config.load(path, environment={}) == accepted
    assert all(sentence.startswith("the configuration: ") and len(sentence) < 1_000 for sentence in sentences)
    assert not any("Input should" in sentence or "Tuple" in sentence for sentence in sentences)  # pydantic's words


@pytest.mark.timeout(10)
def test_a_long_number_is_read_in_time_that_grows_with_its_length() -> None:
    digits = "1" * 200_000
    assert yaml_values.read(f"a: {digits}x", "a file") == {"a": f"{digits}x"}
    with pytest.raises(LmtrainError, match=r"model\.dim=inf"):
        config.load(None, [f"model.dim={digits}"], {})


TEXTS = st.text() | st.from_regex(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", fullmatch=True)


@given(TEXTS, st.lists(TEXTS, min_size=4, max_size=4))
@settings(max_examples=25)
def test_any_text_survives_being_written_and_read(text: str, more: list[str]) -> None:
    loaded = Config.model_validate({"data": {"text_column": text}, "train": {"sample_prompts": [text, *more]}})
    assert config.load(yaml_values.read(config.dump(loaded), "copy"), environment={}) == loaded
