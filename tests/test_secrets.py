"""Nothing that lmtrain prints or writes contains a secret; no file that it reads can run code or use the network."""

import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import TINY, Lmtrain

ROOT = Path(__file__).parent.parent
CANARY = "s3cr3t-canary-value"
ADDRESS = f"https://user:{CANARY}@127.0.0.1/corpus.txt"


def forms() -> list[bytes]:
    """The canary, and what base64 turns it into at each of its three alignments."""
    encoded = [base64.b64encode(b"\0" * before + CANARY.encode()) for before in range(3)]
    return [CANARY.encode(), *(text[skip:-4] for text, skip in zip(encoded, (0, 2, 3), strict=True))]


def leaks(data: bytes) -> bool:
    return any(form in data for form in forms())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with the canary in every environment variable that may hold a secret."""
    monkeypatch.chdir(tmp_path)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        proxy = f"http://user:{CANARY}@127.0.0.1:{closed.getsockname()[1]}"
    for name, value in (
        ("HF_TOKEN", CANARY),
        ("HF_ENDPOINT", proxy),
        ("HTTPS_PROXY", proxy),
        ("HTTP_PROXY", proxy),
        ("HF_HOME", str(tmp_path / "home")),
    ):
        monkeypatch.setenv(name, value)
    return tmp_path


def files_of(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def test_the_search_finds_a_planted_secret() -> None:
    assert leaks(f"token {CANARY}".encode())
    for before in range(6):
        assert leaks(base64.b64encode(("user:" + "x" * before + CANARY).encode()))
    assert not leaks(b"nothing here")


FAILING = {
    "an address as source": (["download", ADDRESS], "data.source is an address"),
    "an address to tokenize": (["tokenize", ADDRESS], "data.source is an address"),
    "an address to train on": (["train", f"data.source={ADDRESS}"], "data.source is an address"),
    "an address that is no override": (["train", ADDRESS], "not of the form"),
    "an address that looks like one": (["train", f"{ADDRESS}?a=b"], "unknown key http"),
    "an address in bad YAML": (["train", f"train.sample_prompts=[{ADDRESS}: ["], "not valid YAML"),
    "an address after a list": (["train", f"train.sample_prompts=[a] {ADDRESS}]"], "not valid YAML"),
    "an address of another type": (["train", f"data.sources=[{ADDRESS}]"], "the field was removed"),
    "an address as a key": (["train", f"data.sources=[{{'{ADDRESS}': 1, '{ADDRESS}': 2}}]"], "duplicate key"),
    "an address in another field": (["train", f"model.dim={ADDRESS}"], "model.dim="),
    "an address in a file": (["train", "-c", "address.yaml"], "data.source is an address"),
    "an address in a bad file": (["train", "-c", "bad.yaml"], "not valid YAML"),
    "no run to evaluate": (["eval"], "no trained run"),
    "an address to evaluate on": (["eval", ADDRESS], "eval accepts only eval.field=value"),
    "no run to generate from": (["generate", "x"], "no trained run"),
    "bad configuration": (["train", "model.dimm=3"], "did you mean model.dim?"),
}


@pytest.mark.parametrize("name", FAILING)
def test_a_command_that_fails_prints_no_secret(folder: Path, name: str, lmtrain: Lmtrain) -> None:
    (folder / "address.yaml").write_text(f"data:\n  source: {ADDRESS}\n")
    (folder / "bad.yaml").write_text(f"data:\n  source: '{ADDRESS}\n  dir: x\n")
    arguments, message = FAILING[name]
    done = lmtrain(*arguments)
    assert done.code == (1 if name.startswith("no run") else 2)
    assert message in done.err
    assert not leaks((done.out + done.err).encode())
    assert {path.name for path in files_of(folder)} == {"address.yaml", "bad.yaml"}


def test_an_address_in_the_environment_is_not_printed(
    folder: Path, lmtrain: Lmtrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMTRAIN_DATA__SOURCE", ADDRESS)
    done = lmtrain("train")
    assert done.code == 2
    assert "data.source is an address" in done.err
    assert not leaks((done.out + done.err).encode())


def test_a_download_that_fails_prints_and_stores_no_secret(folder: Path) -> None:
    code = "import sys, time; time.sleep = lambda _: None; from lmtrain.cli.app import main; main()"
    command = [sys.executable, "-c", code, "train", "data.source=own/text", "data.revision=" + "a" * 40]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 1
    assert b"check the network" in done.stderr
    assert not leaks(done.stdout + done.stderr)
    assert not [path for path in files_of(folder) if leaks(path.read_bytes())]


def test_a_run_contains_no_secret(folder: Path, lmtrain: Lmtrain) -> None:
    for arguments in (
        ["train", *TINY, "--json"],
        ["train", *TINY, "--dry-run"],
        ["eval"],
        ["generate", "the", "--json"],
    ):
        done = lmtrain(*arguments)
        assert done.code == 0, done.err
        assert not leaks((done.out + done.err).encode())
    files = list(files_of(folder))
    kinds = {"config.yaml", "metrics.jsonl", "model.safetensors", "manifest.json", "state.json", "train-00000.npy"}
    assert kinds <= {path.name for path in files}
    assert [path for path in files if "tfevents" in path.name]
    assert not [path for path in files if leaks(path.read_bytes())]


def test_no_file_that_is_read_can_run_code_or_use_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.hostile.watched", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["control"] == ["compile", "exec", "pickle.find_class", "socket.__new__"]
    assert result["seen"] == []
