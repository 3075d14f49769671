"""The house rules that a reader relies on: imports run one way, and nothing heavy is loaded for `--help`."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lmtrain"

ORDER = ["system", "config", "storage", "data", "nn", "model", "evaluation", "generation", "training", "cli"]
"""The packages, from the bottom up: each imports from itself and from those before it."""
LOOSE = {"__init__", "__main__", "errors"}
"""The modules that lie in no package."""


def _imports(path: Path) -> set[str]:
    """The full names of all modules, and of all names, that a file imports."""
    tree = ast.parse(path.read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _modules(path: Path) -> set[str]:
    """The modules of lmtrain that a file imports, as `package.module`."""
    inside = {name.removeprefix("lmtrain.") for name in _imports(path) if name.startswith("lmtrain.")}
    return {name for name in inside if (PACKAGE / f"{name.replace('.', '/')}.py").exists()}


def test_every_module_lies_in_a_package_of_the_order() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(ORDER)
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE


@pytest.mark.parametrize("package", ORDER)
def test_imports_run_down(package: str) -> None:
    below = {*ORDER[: ORDER.index(package) + 1], "errors"}
    for path in (PACKAGE / package).glob("*.py"):
        above = {name for name in _modules(path) if name.partition(".")[0] not in below}
        assert not above, f"{path.name} imports {above}"


@pytest.mark.parametrize("package", ORDER)
def test_imports_inside_a_package_have_no_cycle(package: str) -> None:
    graph = {
        f"{package}.{path.stem}": {name for name in _modules(path) if name.startswith(f"{package}.")}
        for path in (PACKAGE / package).glob("*.py")
    }
    assert list(TopologicalSorter(graph).static_order())


def test_building_blocks_import_nothing_but_each_other() -> None:
    for path in (PACKAGE / "nn").glob("*.py"):
        assert all(name.startswith("nn.") for name in _modules(path)), path


def test_search_knows_ids_alone() -> None:
    for name in ("search", "sampling", "beam", "extensions"):
        modules = _modules(PACKAGE / "generation" / f"{name}.py")
        assert modules <= {"errors", "generation.search", "generation.sampling", "generation.extensions"}, name


def test_nothing_reads_or_writes_pickles() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert not {"pickle", "shelve", "marshal", "dill", "joblib"} & _imports(path), path
        assert "torch.load" not in path.read_text(), path
        assert "torch.save" not in path.read_text(), path


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["generate", "-h"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, lmtrain.cli.app\n"
        f"sys.argv = ['lmtrain', *{arguments!r}]\n"
        "try: lmtrain.cli.app.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'datasets', 'tokenizers', 'numpy', 'rich', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "lmtrain" in done.stdout
