"""The commands that the documentation prints are accepted, and those for your own text are run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from lmtrain.cli import app as cli
from lmtrain.cli.options import arguments
from lmtrain.config.fields import as_text
from lmtrain.config.loader import RECIPES, is_override, load
from tests.helpers import TINY, Lmtrain

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("configs/*.md"), *ROOT.glob("lmtrain/*/*.md")])
GROUP: Any = typer.main.get_command(cli.app)
COMMAND = re.compile(r"^(?:\$ )?(?:torchrun .* -m )?lmtrain (.*)", re.MULTILINE)
OPTION = re.compile(r"`(--?[a-z][a-z-]*)(?:[ =][^`]*)?`")
FOREIGN = {"--nproc-per-node", "--nnodes", "--max-restarts", "--standalone", "--rdzv-endpoint", "--tune"}
"""Options of torchrun, and of scripts/reproduce."""


class Printed(NamedTuple):
    page: Path
    arguments: list[str]


def printed() -> Iterator[Printed]:
    """The arguments of the commands in the code blocks of all pages, without comments, redirections and `...`."""
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in COMMAND.findall(block.replace("\\\n", " ")):
                words = shlex.split(line.partition(" > ")[0], comments=True)
                yield Printed(page, [word for word in words if word != "..." and not word.endswith("=...")])


@pytest.mark.parametrize("command", list(printed()), ids=lambda command: f"{command.page.parent.name}: {command[1]}")
def test_a_printed_command_is_accepted(command: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, *words = command.arguments
    given = GROUP.commands[name].make_context(name, words).params
    overrides = arguments(given.get("source") or given.get("prompt"), given["overrides"])
    first = None if not overrides or is_override(overrides[0]) else overrides.pop(0)
    config: Path | None = given["config"]
    if given.get("fields"):
        assert first is not None
        assert as_text(first)
        return
    if config is not None and not config.exists():
        assert config.parts[0] == "runs" or str(config) in RECIPES, f"{config} is not a file or recipe"
        config = None if config.parts[0] == "runs" else config
    assert load(config, [*overrides, *([f"data.source={first}"] if "source" in given else [])], {})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_described_option_exists(page: Path) -> None:
    known = {name for command in [GROUP, *GROUP.commands.values()] for option in command.params for name in option.opts}
    assert set(OPTION.findall(page.read_text())) <= known | {"-h", "--help"} | FOREIGN


def test_the_commands_for_own_text_run(lmtrain: Lmtrain, folder: Path) -> None:
    """With a tiny model, of a few steps."""
    (folder / "book.txt").write_text("Once upon a time there was a small river in the north.\n" * 300)
    section = (ROOT / "README.md").read_text().partition("## Train on your own text")[2].partition("\n## ")[0]
    commands = [shlex.split(line, comments=True) for line in COMMAND.findall(section)]
    assert [command[0] for command in commands] == ["train", "generate"]
    for command in commands:
        tiny = [*TINY[2:], "train.steps=2", "tokenizer.vocab_size=300"] if command[0] == "train" else ["-n", "5"]
        done = lmtrain(*command, *tiny)
        assert done.code == 0, done.err
    assert done.out.startswith("Once")


def test_the_python_example_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model, of a few steps, by the environment."""
    (folder / "book.txt").write_text("Once upon a time there was a small river in the north.\n" * 300)
    for override in [*TINY[2:], "train.steps=2", "tokenizer.vocab_size=300"]:
        key, _, value = override.partition("=")
        monkeypatch.setenv(f"LMTRAIN_{key.replace('.', '__').upper()}", value)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["log_probs"].exp().sum(-1).tolist() == [pytest.approx([1.0] * names["ids"].shape[1], abs=1e-4)]
    assert len(capsys.readouterr().out.splitlines()) >= 3
