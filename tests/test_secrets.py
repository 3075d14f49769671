"""Nothing that lmtrain prints or writes contains a secret."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import TINY, Lmtrain, contents

CANARY = "s3cr3t-canary-value"
ADDRESS = f"https://user:{CANARY}@127.0.0.1/corpus.txt"


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with the canary in every environment variable that may hold a secret."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        proxy = f"http://user:{CANARY}@127.0.0.1:{closed.getsockname()[1]}"
    for name in ("HF_ENDPOINT", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("HF_HOME", str(folder / "home"))
    return folder


def leaking(folder: Path) -> list[str]:
    return [path for path, content in contents(folder).items() if CANARY.encode() in content]


FAILING = {
    "source": (["download", ADDRESS], "data.source is a URL"),
    "override": (["train", f"data.source={ADDRESS}"], "data.source is a URL"),
    "environment": (["train"], "data.source is a URL"),
    "not an override": (["train", ADDRESS], "data.source is a URL"),
    "looks like an override": (["train", f"{ADDRESS}?a=b"], "data.source is a URL"),
    "bad YAML": (["train", f"train.sample_prompts=[{ADDRESS}: ["], "not valid YAML"),
    "another type": (["train", f"data.sources=[{ADDRESS}]"], "unknown field data.sources"),
    "key": (["train", f"data.sources=[{{'{ADDRESS}': 1, '{ADDRESS}': 2}}]"], "duplicate key"),
    "another field": (["train", f"model.dim={ADDRESS}"], "model.dim="),
    "file": (["train", "-c", "address.yaml"], "data.source is a URL"),
    "bad file": (["train", "-c", "bad.yaml"], "not valid YAML"),
    "eval": (["eval", ADDRESS], "is not an override"),
    "eval with an override": (["eval", f"{ADDRESS}?a=b"], "eval accepts only its options (-h) and eval.FIELD=VALUE"),
}
"""Commands that are given an address with a password, by where it is."""


@pytest.mark.parametrize("name", FAILING)
def test_a_command_that_fails_prints_no_secret(
    folder: Path, name: str, lmtrain: Lmtrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "environment":
        monkeypatch.setenv("LMTRAIN_DATA__SOURCE", ADDRESS)
    (folder / "address.yaml").write_text(f"data:\n  source: {ADDRESS}\n")
    (folder / "bad.yaml").write_text(f"data:\n  source: '{ADDRESS}\n  dir: x\n")
    arguments, message = FAILING[name]
    done = lmtrain(*arguments)
    assert done.code == 2
    assert message in done.err
    assert CANARY not in done.out + done.err
    assert contents(folder).keys() == {"address.yaml", "bad.yaml"}


def test_a_download_that_fails_prints_and_stores_no_secret(folder: Path) -> None:
    code = "import sys, time; time.sleep = lambda _: None; from lmtrain.cli.app import main; main()"
    command = [sys.executable, "-c", code, "train", "data.source=own/text", "data.revision=" + "a" * 40]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "check the network" in done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert not leaking(folder)


def test_a_run_contains_no_secret(folder: Path, lmtrain: Lmtrain) -> None:
    for arguments in (["train", *TINY, "--json"], ["train", *TINY, "--dry-run"], ["eval"], ["generate", "the"]):
        done = lmtrain(*arguments)
        assert done.code == 0, done.err
        assert CANARY not in done.out + done.err
    names = {Path(path).name for path in contents(folder)}
    assert {"config.yaml", "metrics.jsonl", "model.safetensors", "manifest.json", "state.json"} <= names
    assert not leaking(folder)
