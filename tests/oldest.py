"""Constraints for pip: each dependency of lmtrain at its lower bound in pyproject.toml, everything else as usual.

python tests/oldest.py > oldest.txt
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def constraints() -> dict[str, str]:
    """By package, its version as a specifier. Raises ValueError for a dependency without a lower bound."""
    oldest = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["hf"]:
        found = re.match(r"([\w.-]+)>=(\d+)(\.\d+)?", line)
        if found is None:
            raise ValueError(f"pyproject.toml: {line!r} has no lower bound")
        name, major, minor = found.groups()
        oldest[name] = f"=={major}{minor or '.0'}.*"
    pinned = (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    return {name: f"=={version}" for name, _, version in pinned if name not in oldest} | oldest


if __name__ == "__main__":
    print("\n".join(f"{name}{version}" for name, version in constraints().items()))
