"""The app as a whole: help, exit codes, options that mean the same everywhere, and names that are not Unicode."""

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from lmtrain.__main__ import main
from lmtrain.cli import app as cli
from lmtrain.config.loader import is_override
from lmtrain.config.schema import Config
from tests.helpers import Lmtrain

COMMANDS: dict[str, Any] = dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
ESCAPE = "\x1b]0;owned\x07\x9b2J"


def test_version_and_help_are_printed_and_a_command_is_required(lmtrain: Lmtrain) -> None:
    version = lmtrain("--version")
    assert (version.code, version.err) == (0, "")
    assert version.out.startswith("lmtrain 0")
    for arguments in (["-h"], ["--help"], *([name, "-h"] for name in COMMANDS)):
        done = lmtrain(*arguments)
        assert done.code == 0
        assert "Usage: lmtrain" in done.out
    assert lmtrain().code == 2


def test_every_command_takes_a_configuration_and_a_short_option_means_the_same_everywhere() -> None:
    meanings: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        assert {"config", "overrides"} <= {parameter.name for parameter in command.params}
        for parameter in command.params:
            for short in (name for name in parameter.opts if re.fullmatch("-[a-z]", name)):
                meanings.setdefault(short, set()).update(name for name in parameter.opts if name.startswith("--"))
    assert meanings["-n"] == {"--max-tokens"}
    assert all(len(meaning) == 1 for meaning in meanings.values()), meanings


def test_only_fields_of_a_configuration_are_taken_for_overrides() -> None:
    for section in Config.model_fields:
        assert is_override(f"{section}.field=1")
    assert not is_override("self.weight=nn.Parameter(")


def test_messages_have_no_control_characters(lmtrain: Lmtrain, folder: Path) -> None:
    for arguments in (
        ["train", "sample", f"model.{ESCAPE}=1"],
        ["eval", f"--{ESCAPE}"],
        ["tokenize", "a", ESCAPE],
        ["eval", "--run", ESCAPE],
    ):
        done = lmtrain(*arguments)
        assert done.code in (1, 2)
        assert "x1b]0;owned" in done.err
        assert done.err.replace("\n", "").isprintable()


def test_a_terminal_gets_no_control_characters(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither from a prompt nor from a file name; text that is piped stays as it is."""
    assert ESCAPE in lmtrain("generate", f"the {ESCAPE}", "-n", "2").out
    assert "x1b]0;owned" in lmtrain("generate", "--prompts", f"{ESCAPE}.txt").err
    separated = lmtrain("generate", "a\u2028b", "-n", "2", "--json")
    assert len(separated.out.splitlines()) == 1
    assert separated.json["prompt"] == "a\u2028b"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for options in ([], ["--beams", "2"], ["--json"]):
        done = lmtrain("generate", f"the {ESCAPE}é", "-n", "2", *options)
        assert done.code == 0
        assert "\\x9b2Jé" in done.out or "\\u009b2Jé" in done.out
        assert done.out.replace("\n", "").isprintable()
        assert "not in the vocabulary: \\x1b, ]" in done.err


@pytest.mark.parametrize("arguments", [["eval", "data.dir=b\udcffd"], ["train", "data.source=b\udcffd.txt"]])
def test_a_name_that_is_not_utf8_is_called_so(lmtrain: Lmtrain, workdir: Path, arguments: list[str]) -> None:
    done = lmtrain(*arguments)
    assert done.code == 2
    assert "is not UTF-8 text: rename the file" in done.err
    assert "YAML" not in done.err


def test_a_name_that_cannot_be_printed_gets_a_remedy(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("export", "sample", "b\udcffd")
    assert (done.code, done.out) == (1, "")
    assert "'\\udcff' can't be written in utf-8: rename the file" in done.err


def test_a_background_job_of_a_shell_keeps_ignoring_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda: None)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    main()
    assert signal.signal(signal.SIGINT, previous) is signal.SIG_IGN
