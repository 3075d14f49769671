"""A small token store, a small configuration and a small run, shared by the tests of everything above the data."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from lmtrain.cli import app as cli
from lmtrain.config.loader import load
from lmtrain.config.schema import Config
from lmtrain.data.corpus import download
from lmtrain.data.tokenizing import tokenize
from lmtrain.data.tokens import TokenStore

TINY = [
    "data.sample_tokens=3000",
    "model.context=16",
    "model.dim=16",
    "model.layers=1",
    "model.heads=2",
    "model.dropout=0.1",
    "model.attention_dropout=0.1",
    "model.input_dropout=0.1",
    "model.output_dropout=0.1",
    "train.threads=1",
    "train.device=cpu",
    "train.precision=fp32",
    "train.batch_size=4",
    "train.micro_batch=2",
    "train.steps=12",
    "train.log_steps=2",
    "train.eval_steps=5",
    "train.eval_tokens=200",
    "train.ema=0.9",
    "train.sample_tokens=3",
    "eval.batch_size=256",
]
"""Overrides for a model that trains in a second; dropout everywhere, so that a lost seed shows."""

MEMORY = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes that must be free there: what the tests keep at once is far less."""


def pytest_configure() -> None:
    """Lay temporary folders in memory: on a disk, tens of thousands of small files and syncs take most of the time.

    What is synced, and when, is tested by the calls that are made, which no disk has a part in.
    """
    settings.register_profile("lmtrain", deadline=None)  # a busy machine is no failure
    settings.load_profile("lmtrain")
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.fixture(scope="session", autouse=True)
def unmeasured() -> Iterator[None]:
    """No run in this process measures the machine, which takes longer than a tiny training; started processes do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmtrain.training.meter.peak_flops", lambda device, precision: 1e12)
        yield


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def tiny(data_dir: Path) -> Config:
    return load(None, [*TINY, f"data.dir={data_dir}"], {})


@pytest.fixture(scope="session")
def store(tiny: Config) -> TokenStore:
    corpus = download(tiny.data, note=lambda message: None, progress=False)
    return tokenize([corpus], tiny.tokenizer, tiny.data.dir, note=lambda message: None, progress=False)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models are quicker so: a second thread only waits for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Result:
    code: int
    out: str
    err: str


Lmtrain = Callable[..., Result]


@pytest.fixture
def lmtrain(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Lmtrain:
    """Run the command line in this process."""

    def call(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["lmtrain", *map(str, arguments)])
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capfd.readouterr()
        assert isinstance(code, int)
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def load_script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], ModuleType]:
    """A script as a module, whose records go to a folder of the test's own."""
    monkeypatch.setattr("record.RESULTS", tmp_path / "results")
    monkeypatch.setattr("lmtrain.system.allocator.keep_heap", lambda: None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "results").mkdir()

    def load(name: str) -> ModuleType:
        path = Path(__file__).parent.parent / "scripts" / name
        loader = importlib.machinery.SourceFileLoader(f"script_{name}", str(path))
        spec = importlib.util.spec_from_loader(loader.name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tiny configuration was trained, by the installed program."""
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain", "train", *TINY], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def workdir(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder as the working directory: a run must survive being copied."""
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"
