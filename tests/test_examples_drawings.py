"""The drawings of positions and patterns: their figures are the laws' own, and the pictures are there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"


def run(name: str, folder: Path) -> dict[str, Any]:
    """The figures that an example prints; it must have written a picture of some size and more than a few colours."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures: dict[str, Any] = json.loads(printed)
    assert figures["picture"] == str(folder / f"{name}.png")
    with Image.open(folder / f"{name}.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 500
        assert len(picture.convert("RGB").getcolors(2**24) or ()) > 50
    return figures


def test_positions(tmp_path: Path) -> None:
    figures = run("positions", tmp_path)
    deviations = {name: value for name, value in figures.items() if name.endswith("_deviation")}
    assert len(deviations) == 7
    assert all(0 <= deviation < 1e-5 for deviation in deviations.values())


def test_patterns(tmp_path: Path) -> None:
    figures = run("patterns", tmp_path)
    pairs, share, causal = 32 * 32, figures["share"], figures["share_causal"]
    assert share["full"] == 1
    assert causal["full"] == 32 * 33 / 2 / pairs
    assert share["local"] == (32 * 7 - 2 * (1 + 2 + 3)) / pairs
    assert causal["local"] == (32 * 4 - (1 + 2 + 3)) / pairs
    assert share["strided"] == (4 * 5 * 5 + 2 * 6 * 6) / pairs  # 32 positions leave 5 or 6 of each of 6 remainders
    assert share["global"] == (pairs - 30 * 30) / pairs
    assert causal["global"] == (1 + 2 * 31) / pairs
    for name, parts in (("local + strided", ("local", "strided")), ("local + global", ("local", "global"))):
        for shares in (share, causal):
            assert max(shares[part] for part in parts) < shares[name] < sum(shares[part] for part in parts)
