"""Fixtures for all tests: a tiny configuration, its token store, a trained run, and commands in this process."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from lmtrain.api.train import train
from lmtrain.cli import app as cli
from lmtrain.config.loader import load
from lmtrain.config.schema import Config
from lmtrain.data.tokenizing import prepare_store
from lmtrain.data.tokens import TokenStore
from tests.helpers import TINY, Lmtrain, Result, messages

ROOT = Path(__file__).parent.parent
MEMORY = Path("/dev/shm")
FREE_BYTES = 2 << 30
"""What must be free there; the tests use far less at once."""
OWN_SETTINGS = re.compile(r"(LMTRAIN|HF|HUGGINGFACE|TRANSFORMERS)_.*|(?i:.*_proxy)")
"""Of the developer, in the environment: the tests have their own, and a hub on this machine."""


def pytest_configure(config: pytest.Config) -> None:
    """Compute with one thread, and put temporary folders in memory: tiny models are faster so, and on a disk, tens of
    thousands of small files and syncs take most of the time. Other processes import the same code from any folder.

    Which files are synced, and when, is tested on the recorded system calls.

    A GPU is used by `-m gpu` only: forked processes can't compute gradients once autograd has a thread for a device.
    Without a GPU, a PyTorch with CUDA has such a thread after fake tensors have registered a device in place of one.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch._C._ensureCUDADeviceGuardSet = lambda: None
    for name in [name for name in os.environ if OWN_SETTINGS.fullmatch(name)]:
        del os.environ[name]
    os.environ["PYTHONPATH"] = str(ROOT)
    torch.set_num_threads(1)
    # A busy machine is not a failure, and a failure is one of the change, not of chance.
    settings.register_profile("lmtrain", deadline=None, derandomize=True)
    settings.load_profile("lmtrain")
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > FREE_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def unmeasured() -> Iterator[None]:
    """Runs in this process do not measure the machine's peak, which takes longer than a tiny training."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("meter", "profiling"):
            patch.setattr(f"lmtrain.training.{module}.peak_flops", lambda device, precision: 1e12)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def tiny(data_dir: Path) -> Config:
    """A configuration whose token store exists."""
    config = load(None, [*TINY, f"data.dir={data_dir}"], {})
    prepare_store(config)
    return config


@pytest.fixture(scope="session")
def store(tiny: Config) -> TokenStore:
    return prepare_store(tiny)


@pytest.fixture
def notes() -> Iterator[list[str]]:
    """The messages of lmtrain, in this process, during the test."""
    with messages() as found:
        yield found


@pytest.fixture
def lmtrain(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Lmtrain:
    """Run the command line in this process."""

    def call(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["lmtrain", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `lmtrain.train` ran the tiny configuration."""
    folder = tmp_path_factory.mktemp("trained")
    with chdir(folder):
        train(*TINY)
    return folder


@pytest.fixture
def workdir(trained: Path, folder: Path) -> Path:
    """A copy of that folder as the working directory: a run must survive being copied."""
    return shutil.copytree(trained, folder, dirs_exist_ok=True)
