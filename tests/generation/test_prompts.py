"""Prompts from files and standard input, with errors that name the line."""

import io
from pathlib import Path

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.generation.prompts import read_all, read_prompts
from tests.helpers import give_input


def read(path: Path) -> list[tuple[str, str | int | None]]:
    return [(prompt.prompt, prompt.id) for prompt in read_prompts(path)]


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b'\xef\xbb\xbfThe river\r\n\n \n{"prompt": 1}\n caf\xc3\xa9')
    assert read(path) == [("The river", 1), ('{"prompt": 1}', 4), (" café", 5)]


def test_json_lines_have_a_prompt_and_may_have_an_id(tmp_path: Path) -> None:
    path = tmp_path / "some.JSONL"
    path.write_text(
        '{"prompt": "a\\r\\nb\\r", "id": "x"}\n\n{"prompt": "", "more": null}\n{"id": 7, "prompt": "c"}\n'
        '{"prompt": "d", "id": 0}\n{"prompt": "e", "id": ""}\n'
    )
    assert read(path) == [("a\nb\n", "x"), ("", 3), ("c", 7), ("d", 0), ("e", "")]


def test_standard_input_has_a_prompt_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"\n{a\nb\n")
    assert read(Path("-")) == [("{a", 2), ("b", 3)]


ILL_FORMED = [
    *(b"[" * 9999, b"9" * 9999, b'["a"]', b'{"text": "a"}', b'{"prompt": 5}', b'{"prompt": null}'),
    *(b'{"prompt": "a", "id": true}', b'{"prompt": "a", "id": [1]}', b'{"prompt": "\\ud800"}'),
]
WRONG = {
    "a.txt": [(b"", "has no prompts"), (b"\n \n", "has no prompts"), (b"a\nb\xff\n", "line 2, is not UTF-8.*byte 1")],
    "a.json": [(b'{"prompt": "a"}', "prompts are read from a text file, one per line, or a .jsonl file")],
    "a.txt.gz": [(b"\x1f\x8b\x08", "line 1, is not UTF-8 .*, or unpack it$")],
    "a.jsonl": [
        (b"", "has no prompts"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2, is not JSON of the form"),
        *((line, "line 1, is not JSON of the form") for line in ILL_FORMED),
        (b'{"prompt": "\xff"}', "line 1, is not UTF-8"),
    ],
}


@pytest.mark.parametrize(
    ("name", "content", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_errors_name_the_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LmtrainError, match=f"{name}.*{message}") as raised:
        list(read_prompts(tmp_path / name))
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(LmtrainError, match=f"{path.name} can't be read"):
            list(read_prompts(path))


def test_all_of_standard_input_is_one_prompt() -> None:
    assert read_all(io.BytesIO("\ufeffa\r\nb\ré\r\n".encode())) == "a\nb\né"
    assert read_all(io.BytesIO(b"a\n\n")) == "a\n"
    for content, message in ((b"", "no prompt"), (b"\n", "no prompt"), (b"a\xff", "byte 1")):
        with pytest.raises(LmtrainError, match=message):
            read_all(io.BytesIO(content))
