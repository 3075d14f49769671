"""Prompts from files and standard input."""

from pathlib import Path

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.generation.prompts import read_all, read_prompts
from tests.helpers import give_input


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        (
            "a.txt",
            b'\xef\xbb\xbfThe river\r\n\n \n{"prompt": 1}\n caf\xc3\xa9',
            ["The river", '{"prompt": 1}', " caf\xe9"],
        ),
        ("a.JSONL", b'{"prompt": "a\\nb", "id": 7}\n\n{"prompt": ""}\n', ["a\nb", ""]),
        ("a.csv", b"id,prompt\n1,a\n2,b\n", ["a", "b"]),
    ],
)
def test_a_prompt_is_a_line_or_a_value_of_its_column(
    tmp_path: Path, name: str, content: bytes, prompts: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert list(read_prompts(tmp_path / name)) == prompts


def test_standard_input_has_a_prompt_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"\n{a\nb\n")
    assert list(read_prompts(Path("-"))) == ["{a", "b"]
    give_input(monkeypatch, b"\n")
    with pytest.raises(LmtrainError, match="standard input has no prompts"):
        list(read_prompts(Path("-")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "has no prompts"),
        ("a.txt", b"a\nb\xff\n", "is not plain text in UTF-8"),
        ("a.jsonl", b"", "has no prompts"),
        ("a.jsonl", b'{"text": "a"}', r"line 1, has no column 'prompt'.*\('text'\) .*, or, for prompts, rename it"),
        ("none.txt", None, "can't be read"),
    ],
)
def test_what_has_no_prompts_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(LmtrainError, match=f"{name}.*{message}"):
        list(read_prompts(tmp_path / name))


def test_all_of_standard_input_is_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    for content, text in (("\ufeffa\r\nb\r\xe9\r\n".encode(), "a\nb\n\xe9"), (b"a\n\n", "a\n")):
        give_input(monkeypatch, content)
        assert read_all() == text
    for content, message in ((b"", "no prompt"), (b"\n", "no prompt"), (b"a\xff", "standard input is not plain text")):
        give_input(monkeypatch, content)
        with pytest.raises(LmtrainError, match=message):
            read_all()
