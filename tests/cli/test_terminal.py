"""`lmtrain generate` on a terminal: streamed text, conversations, Ctrl-C and Ctrl-D."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmtrain.api.run import load
from lmtrain.cli import prompting
from lmtrain.generation.options import Options
from tests.helpers import Lmtrain, default_interrupts, give_input


class Terminal:
    """The other end of a terminal on which the command runs."""

    def __init__(self, end: int, process: "subprocess.Popen[bytes]") -> None:
        self.end = end
        self.process = process
        self.output = ""

    def type(self, keys: str) -> None:
        os.write(self.end, keys.encode())

    def wait_for(self, pattern: str) -> str:
        """What is on the screen up to the end of the first match; later calls search after it."""
        deadline = time.monotonic() + 60
        while (match := re.search(pattern, self.output)) is None:
            ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.output[-500:]!r}"
            try:
                more = os.read(self.end, 4096).decode(errors="replace")
            except OSError:  # Linux says so when the other side has closed the terminal
                more = ""
            assert more, f"no {pattern!r} in {self.output[-500:]!r}"
            self.output += more.replace("\r\n", "\n")
        before, self.output = self.output[: match.end()], self.output[match.end() :]
        return before


@contextmanager
def on_terminal(*arguments: str) -> Iterator[Terminal]:
    """The command, with a terminal for its input and both outputs."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb"}
    command = [sys.executable, "-m", "lmtrain", "generate", *arguments]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        preexec_fn=default_interrupts,  # noqa: PLW1509 -- no other thread is running
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_in_a_conversation_ctrl_d_quits(workdir: Path) -> None:
    with on_terminal("-n", "20", "--seed", "1") as screen:
        screen.wait_for("Ctrl-D quits.\nprompt> ")
        screen.type("The river\n")
        screen.wait_for(r"The river\n")  # the echo
        screen.wait_for(r"(?s)The river.*?\w.*?\nprompt> ")
        screen.type("A xyzzy, the\n")
        screen.wait_for("not in the vocabulary: xyzzy\n")
        screen.wait_for(r"(?s)A xyzzy, the.*?\w.*?\nprompt> ")
        screen.type("\x04")
        assert screen.process.wait(30) == 0


def test_ctrl_c_at_a_prompt_leaves_the_terminal_as_it_was(workdir: Path) -> None:
    with on_terminal() as screen:
        before = termios.tcgetattr(screen.end)
        screen.wait_for("prompt> ")
        assert termios.tcgetattr(screen.end) != before
        time.sleep(0.5)  # a signal between the prompt and readline's wait for a key would have no effect until a key
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(30) == 130
        assert termios.tcgetattr(screen.end) == before


def test_ctrl_c_ends_a_text(workdir: Path) -> None:
    with on_terminal("The river", "-n", "1000000") as screen:
        screen.wait_for(r"The river(\W*\w+){5}")
        screen.process.send_signal(signal.SIGINT)
        assert screen.process.wait(30) == -signal.SIGINT


@pytest.mark.parametrize(
    ("options", "streamed"),
    [
        ("--greedy", True),
        ("--seed 0", True),
        ("--beams 2", False),
        ("--samples 2 --seed 0", False),
        ("--greedy --prompts two.txt", False),
    ],
)
def test_a_terminal_gets_what_is_printed_elsewhere_and_only_a_single_text_is_streamed(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch, options: str, streamed: bool
) -> None:
    (workdir / "two.txt").write_text("The river, (a\nThe river\n")
    prompt = [] if "--prompts" in options else ["The river, (a"]
    arguments = ["generate", *prompt, *f"-n 60 {options}".split(), "--stop-string", "of the"]
    printed = lmtrain(*arguments).out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    writes: list[str] = []
    write = prompting._write

    def recorded(text: str) -> None:
        writes.append(text)
        write(text)

    monkeypatch.setattr(prompting, "_write", recorded)
    assert lmtrain(*arguments).out == printed
    assert (len([text for text in writes if text]) > 3) == streamed


def test_a_prompt_asked_twice_gets_another_sample_streamed_or_not(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, options = load("runs/sample"), Options(max_tokens=9, seed=1, temperature=2.0)

    def texts() -> str:
        prompting.complete_prompts(run, options, iter(["The river"] * 2), 1, as_json_lines=False)
        return capfd.readouterr().out

    printed = texts()
    first, second = printed.removeprefix("The river").split("The river")
    assert first != second
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert texts() == printed


def test_prompts_are_asked_for_on_stderr_if_texts_go_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give_input(monkeypatch, b"a\n\nb\n")
    assert list(prompting.typed_prompts()) == ["a", "", "b"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("prompt> " * 4 + "\n")


def test_a_conversation_may_be_in_json(lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_input(monkeypatch, b"The river\n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printed = lmtrain("generate", "-n", "2", "--json").out.removeprefix("prompt> ").removesuffix("prompt> ")
    assert json.loads(printed)["prompt"] == "The river"


def test_no_line_end_is_added_to_a_prompt_that_has_one_and_no_text(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", "The river\n", "--greedy", "-n", "1"]
    assert lmtrain(*arguments).out == "The river\n\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert lmtrain(*arguments, "--stop-string", "\n").out == "The river\n"
