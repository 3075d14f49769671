"""Golden values: each recipe, shrunk to a second of training, gives the losses and the text that it gave before.

    python -m tests.test_golden

rewrites tests/golden.json, after a change that is meant to change the numbers. The values hold for any CPU and any
version of torch to about 1e-5: fp32, also in Muon, which would else compute in bf16 where the CPU does; one thread; and
no dropout, whose random bits depend on torch's build.
"""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import lmtrain
from lmtrain.generation.options import Options

CONFIGS = Path(__file__).parent.parent / "configs"
GOLDEN = Path(__file__).parent / "golden.json"
AUTOMATIC = "automatic"
"""The recipe for your own text."""
RECIPES = [AUTOMATIC, *sorted(path.stem for path in CONFIGS.glob("*.yaml"))]
SMALL: dict[str, dict[str, Any]] = {
    "data": {"source": "sample", "sample_tokens": 3000},
    "model": {"context": 16, "dim": 24, "ff_dim": 32, "heads": 2},
    "train": {
        **{"device": "cpu", "precision": "fp32", "compile": False, "threads": 1},
        **{"batch_size": 4, "steps": 3, "epochs": None, "max_minutes": None, "warmup": 0.0},
        **{"log_steps": 1, "eval_steps": 3, "eval_tokens": 50, "sample_prompts": []},
    },
    "eval": {"batch_size": 64},
}
"""Sizes that replace those of every recipe."""
REPLACED: dict[str, dict[str, Any]] = {
    "tokenizer": {"vocab_size": 300},
    "model": {"embed_dim": 12} | dict.fromkeys(("dropout", "attention_dropout", "input_dropout", "output_dropout"), 0),
    "eval": {"stride": None},
}
"""Values that replace those of the recipes that set them."""


def overrides(recipe: str) -> list[str]:
    """What shrinks a recipe, as overrides."""
    given: dict[str, Any] = {"model": {"layers": 4}, "tokenizer": {"vocab_size": None}}
    if recipe != AUTOMATIC:
        given = yaml.safe_load((CONFIGS / f"{recipe}.yaml").read_text())
    fields = [(section, *item) for section, items in SMALL.items() for item in items.items()]
    fields += [("model", "layers", given["model"]["layers"] // 2)]
    for section, items in REPLACED.items():
        fields += [(section, *item) for item in items.items() if item[0] in given.get(section, {})]
    return [f"{section}.{field}={json.dumps(value)}" for section, field, value in fields]


def measure(recipe: str) -> dict[str, Any]:
    """The losses of the first three steps, the evaluation after them, and a greedy text that avoids repetition.

    The run is in the working directory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmtrain.training.optimizers.choose_precision", lambda *_: "fp32")
        config = None if recipe == AUTOMATIC else CONFIGS / f"{recipe}.yaml"
        folder = lmtrain.train(*overrides(recipe), config=config, quiet=True).folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    run = lmtrain.load(folder, device="cpu", precision="fp32")
    (found,) = run.complete(["The"], Options(repetition_penalty=2.0, max_tokens=8))
    return {
        "losses": [row["loss"] for row in rows if row["kind"] == "train"],
        "valid": [row["loss"] for row in rows if row["kind"] == "valid"],
        "text": found.completions[0].text,
        "log_probs": found.completions[0].token_log_probs,
    }


def test_every_recipe_has_golden_values() -> None:
    assert sorted(json.loads(GOLDEN.read_text())) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_gives_its_golden_losses_and_text(recipe: str, folder: Path) -> None:
    golden, found = json.loads(GOLDEN.read_text())[recipe], measure(recipe)
    assert len(found["losses"]) == 3
    for name, tolerance in (("losses", 1e-5), ("valid", 1e-5), ("log_probs", 1e-4)):
        assert found[name] == pytest.approx(golden[name], rel=tolerance), name
    assert found["text"] == golden["text"]


def main() -> None:
    """Write tests/golden.json again from the present code."""
    found = {}
    for recipe in RECIPES:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            found[recipe] = measure(recipe)
    GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
