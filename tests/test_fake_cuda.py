"""The cases of tests/fake_cuda, in a process of their own: what it takes to have the device is there for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.fake_cuda import LIBRARY

HERE = Path(__file__).parent / "fake_cuda"
TORCH = Path(torch.__file__).parent


def compile_device(library: Path) -> None:
    compiler = os.environ.get("CXX", "g++")
    places = [f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{TORCH / 'lib'}"]
    command = [compiler, "-std=c++20", "-shared", "-fPIC", str(HERE / "device.cpp"), "-o", str(library), *places]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"needs a C++ compiler: {error}")
    if done.returncode:
        pytest.skip(f"written for another torch: {done.stderr[:200]}")


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA of its own, so the gpu tests are the ones")
def test_cases(tmp_path: Path) -> None:
    library = tmp_path / "device.so"
    compile_device(library)
    cases = [str(file) for file in sorted(HERE.glob("*_cases.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fake_cuda", "-p", "no:cacheprovider", *cases]
    root = HERE.parent.parent
    paths = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    surroundings = os.environ | {LIBRARY: str(library), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
