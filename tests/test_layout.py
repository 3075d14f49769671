"""Rules of the code base: imports point one way, `--help` loads nothing heavy, dependencies have a lower bound."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.oldest import constraints

PACKAGE = Path(__file__).parent.parent / "lmtrain"

ORDER = [
    *("system", "config", "storage", "data", "nn", "model"),
    *("evaluation", "generation", "training", "export", "api", "cli"),
]
"""The packages, lowest first: each imports only from itself and from those before it."""
LOOSE = {"__init__", "__main__", "errors"}
"""The modules that are in no package."""


def _imports(path: Path) -> set[str]:
    """The full names of the modules, and of the names from modules, that a file imports."""
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


def test_a_type_checker_finds_the_types_of_an_installed_lmtrain() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["lmtrain"]  # PEP 561
    assert (PACKAGE / "py.typed").is_file()


def test_every_module_is_in_a_package_of_the_order() -> None:
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(ORDER)
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_lower_packages(package: str) -> None:
    below = {*ORDER[: ORDER.index(package) + 1], "errors"}
    for path in (PACKAGE / package).glob("*.py"):
        above = {name for name in _modules(path) if name.partition(".")[0] not in below}
        assert not above, f"{path.name} imports {above}"


@pytest.mark.parametrize("package", ORDER)
def test_imports_within_a_package_have_no_cycle(package: str) -> None:
    graph = {
        f"{package}.{path.stem}": {name for name in _modules(path) if name.startswith(f"{package}.")}
        for path in (PACKAGE / package).glob("*.py")
    }
    assert list(TopologicalSorter(graph).static_order())


def test_building_blocks_import_only_each_other() -> None:
    for path in (PACKAGE / "nn").glob("*.py"):
        assert all(name.startswith("nn.") for name in _modules(path)), path


def test_search_works_on_ids_only() -> None:
    for name in ("search", "sampling", "beam"):
        modules = _modules(PACKAGE / "generation" / f"{name}.py")
        assert modules <= {"errors", "generation.options", "generation.search"}, name


def test_only_the_code_of_exported_models_imports_transformers() -> None:
    users = {path.name for path in PACKAGE.rglob("*.py") if any("transformers" in name for name in _imports(path))}
    assert users == {"modeling_lmtrain.py"}
    assert not any("modeling_lmtrain" in name for path in PACKAGE.rglob("*.py") for name in _imports(path))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, lmtrain.cli.app\n"
        "for arguments in ('--help', 'train --help', 'generate -h', 'export -h', '--version'):\n"
        "    sys.argv = ['lmtrain', *arguments.split()]\n"
        "    try: lmtrain.cli.app.main()\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'datasets', 'tokenizers', 'numpy', 'rich', 'yaml', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert done.stdout.count("Usage: lmtrain") == 4


def test_the_versions_of_the_oldest_job_are_not_above_the_pinned_ones() -> None:
    pinned = dict(line.split("==") for line in (PACKAGE.parent / "constraints.txt").read_text().splitlines()[1:])
    oldest = constraints()
    assert oldest.keys() == pinned.keys()
    for name, specifier in oldest.items():
        version = [int(part) for part in specifier.strip("=*.").split(".")]
        assert version <= [int(part) for part in pinned[name].split(".")], name
