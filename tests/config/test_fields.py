"""The descriptions of all fields."""

from pathlib import Path

from lmtrain.config.fields import fields
from lmtrain.config.loader import flat, load
from lmtrain.config.schema import Config

PAGE = Path(__file__).parents[2] / "configs" / "README.md"


def test_every_field_is_described_once() -> None:
    described = list(fields())
    assert [field.name for field in described] == list(flat(Config()))
    assert [field.name for field in described if not field.description] == []


def test_defaults_are_written_as_overrides() -> None:
    assert load(None, [f"{field.name}={field.default}" for field in fields()], {}) == Config()


def test_the_page_lists_every_recipe() -> None:
    page = PAGE.read_text()
    for recipe in PAGE.parent.glob("*.yaml"):
        assert f"`{recipe.name}`" in page


def test_the_example_on_the_page_is_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(PAGE.read_text().partition("```yaml\n")[2].partition("```")[0])
    example = ["data.source=book.txt", "model.layers=6", "train.max_minutes=20"]
    assert load(file, [], {}) == load(None, example, {})
