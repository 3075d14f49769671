"""The examples of sets and counting, for a few steps: they learn, their figures are finite, the picture is there."""

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Calls an example's `main`; its results, after a look at what it printed and drew."""

    def call(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.syspath_prepend(EXAMPLES)
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert not capsys.readouterr().out  # nothing happens on import
        results: dict[str, Any] = module.main([*arguments, "--out", str(tmp_path / "new")])
        assert json.loads(capsys.readouterr().out) == results
        assert results["picture"] == str(tmp_path / "new" / f"{name}.png")
        with Image.open(results["picture"]) as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 500
        assert all(math.isfinite(figure) for figure in results.values() if isinstance(figure, float))
        return results

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)


@pytest.mark.parametrize("attention", ["isab", "sab"])
def test_largest(run: Any, attention: str) -> None:
    results = run("largest", "--steps", "50", "--attention", attention)
    assert results["steps"] == 50
    assert 0 < results["chance_accuracy"] < 0.1
    assert results["pointing_accuracy"] > 0.7
    assert results["regression_mse"] < 0.4 * results["mean_mse"]


def test_counting(run: Any) -> None:
    results = run("counting", "--steps", "80")
    assert results["steps"] == 80
    assert results["r2"] > results["r2_without_begin"] + 0.1
    assert results["r2"] > 0.7
