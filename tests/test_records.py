"""The README's table is made from the records, and every record says what is needed to judge and repeat it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "scripts" / "results").glob("*.json"))
NEEDED = {"title", "result", "command", "commit", "date", "machine", "versions", "seed"}


def test_the_readme_holds_the_table_of_all_records() -> None:
    script = ROOT / "scripts" / "table.py"
    table = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert all(f"| `{path.stem}` | " in table for path in RECORDS)
    trials = [record["trials"] for path in RECORDS if "trials" in (record := json.loads(path.read_text()))]
    assert len(table.splitlines()) == len(RECORDS) + 2 + sum(len(found) + 5 for found in trials)
    assert table in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_record_is_complete_and_names_no_private_path(path: Path) -> None:
    text = path.read_text()
    assert json.loads(text).keys() >= NEEDED
    assert str(Path.home()) not in text
