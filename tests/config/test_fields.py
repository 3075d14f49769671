"""The descriptions of all fields."""

from pathlib import Path

import pytest

from lmtrain.config.fields import as_text, fields
from lmtrain.config.loader import flat
from lmtrain.config.schema import Config

PAGE = Path(__file__).parents[2] / "configs" / "README.md"


def test_every_field_is_described_once() -> None:
    described = list(fields())
    assert [field.name for field in described] == list(flat(Config()))
    assert [field.name for field in described if not field.description] == []


@pytest.mark.parametrize("prefix", ["train", "train.eval_", "nothing"])
def test_a_prefix_selects_fields(prefix: str) -> None:
    names = [line.partition("=")[0] for line in as_text(prefix).splitlines() if line and not line.startswith(" ")]
    assert names == [name for name in flat(Config()) if name.startswith(prefix)]


def test_the_page_lists_every_recipe() -> None:
    page = PAGE.read_text()
    for recipe in PAGE.parent.glob("*.yaml"):
        assert f"`{recipe.name}`" in page
