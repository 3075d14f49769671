"""Prompts from files and standard input: read one batch at a time, with errors that name the line."""

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmtrain.errors import LmtrainError
from lmtrain.generation import prompts
from lmtrain.generation.prompts import Prompt, batches, read_all, read_prompts


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b'\xef\xbb\xbfThe river\r\n\n \n{"prompt": 1}\n caf\xc3\xa9')
    assert list(read_prompts(path)) == [Prompt(1, "The river"), Prompt(4, '{"prompt": 1}'), Prompt(5, " café")]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"prompt": "a\\r\\nb", "id": "x"}\n\n{"prompt": "", "more": null}\n{"id": 7, "prompt": "c"}\n')
    assert list(read_prompts(path)) == [Prompt("x", "a\nb"), Prompt(3, ""), Prompt(7, "c")]


def test_standard_input_has_a_prompt_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, b"\n{a\nb\n")
    assert list(read_prompts(Path("-"))) == [Prompt(2, "{a"), Prompt(3, "b")]


WRONG = {
    "a.txt": [(b"", "has no prompts"), (b"\n \n", "has no prompts"), (b"a\nb\xff\n", "line 2, is not UTF-8.*byte 1")],
    "a.jsonl": [
        (b"", "has no prompts"),
        (b'{"prompt": "a"}\n{"prompt": \n', "line 2, is not JSON"),
        (b"[" * 9999, "line 1, is not JSON"),
        (b"9" * 9999, "line 1, is not JSON"),
        (b'["a"]', "line 1, is not a JSON object"),
        (b'{"text": "a"}', "line 1, has no 'prompt'"),
        (b'{"prompt": 5}', "line 1, has a 'prompt' that is int"),
        (b'{"prompt": null}', "line 1, has a 'prompt' that is NoneType"),
        (b'{"prompt": "a", "id": true}', "line 1, has an 'id' that is bool"),
        (b'{"prompt": "a", "id": [1]}', "line 1, has an 'id' that is list"),
        (b'{"prompt": "\\ud800"}', "line 1, has half a character.*'prompt'"),
        (b'{"prompt": "a", "id": "\\ud800"}', "line 1, has half a character.*'id'"),
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


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(LmtrainError, match=f"{path.name} can't be read"):
            list(read_prompts(path))


def test_long_lines_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LONGEST_PROMPT", 8)
    (tmp_path / "a.txt").write_text("12345678\n")
    with pytest.raises(LmtrainError, match="line 1, is longer"):
        list(read_prompts(tmp_path / "a.txt"))
    with pytest.raises(LmtrainError, match="standard input is longer"):
        read_all(io.BytesIO(b"123456789"))


def test_batches_are_read_one_at_a_time() -> None:
    read = []

    def source() -> Iterator[Prompt]:
        for number in range(5):
            read.append(number)
            yield Prompt(number, "")

    found = batches(source(), 2)
    assert [prompt.id for prompt in next(found)] == [0, 1]
    assert read == [0, 1]
    assert [len(batch) for batch in found] == [2, 1]


def test_all_of_standard_input_is_one_prompt() -> None:
    assert read_all(io.BytesIO("\ufeffa\r\nb é\r\n".encode())) == "a\nb é"
    assert read_all(io.BytesIO(b"a\n\n")) == "a\n"
    for content, message in ((b"", "no prompt"), (b"\n", "no prompt"), (b"a\xff", "byte 1")):
        with pytest.raises(LmtrainError, match=message):
            read_all(io.BytesIO(content))
