"""The house rules that a reader relies on: imports run one way, and nothing heavy is loaded for `--help`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lmtrain"

FLOORS = {
    "__main__": 9,
    "cli": 8,
    "generate_command": 7,
    "eval_command": 7,
    "answers": 6,
    "printing": 5,
    "training": 4,
    "terminal": 4,
    "inference": 3,
    "completion": 3,
    "evaluation": 2,
    "adaptation": 2,
    "decoding": 2,
    "checkpoint": 1,
    "data": 1,
    "nn": 1,
    "run_folder": 0,
    "picture": 0,
    "runtime": 0,
    "workers": 0,
    "tensor_files": 0,
    "launcher": 0,
    "allocator": 0,
    "config": 0,
    "config_yaml": 0,
    "schema": 0,
    "schema_base": 0,
    "schema_train": 0,
    "options": 0,
    "files": 0,
    "signals": 0,
    "errors": 0,
    "escapes": 0,
    "": 0,
}
"""Each part imports from its own floor or a lower one; of the others on its own floor, only floor 0 is shared."""


def _part(module: str) -> str:
    return [*module.split("."), ""][1]


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"lmtrain.{alias.name}" for alias in node.names] if node.module == "lmtrain" else [node.module]
            found.update(
                name if _part(name) in FLOORS or not name.startswith("lmtrain") else "lmtrain" for name in names
            )
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    own = "" if own == "__init__" else own
    for module in _imports(path):
        if module.split(".")[0] != "lmtrain":
            continue
        other = _part(module)
        allowed = other == own or FLOORS[other] < FLOORS[own] or FLOORS[other] == FLOORS[own] == 0
        assert allowed, f"{own} must not import {module}"


def test_decoding_knows_ids_alone() -> None:
    for path in (PACKAGE / "decoding").glob("*.py"):
        ours = {module for module in _imports(path) if module.startswith("lmtrain")}
        assert all(_part(module) in {"decoding", "errors"} for module in ours), path


def test_nothing_reads_or_writes_pickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {"pickle", "shelve", "marshal", "dill", "joblib"} & _imports(path), path
        assert "torch.load" not in path.read_text(), path
        assert "torch.save" not in path.read_text(), path


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["generate", "-h"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, lmtrain.cli\n"
        f"sys.argv = ['lmtrain', *{arguments!r}]\n"
        "try: lmtrain.cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'datasets', 'tokenizers', 'numpy', 'rich', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "lmtrain" in done.stdout
