"""The records are complete, their pages are up to date, and a new record replaces the old one of the same command."""

import json
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pages
import pytest
import record

PATHS = sorted(record.RESULTS.glob("*.json"))
TYPES: dict[str, type] = dict.fromkeys(("benchmark", "date", "commit", "command"), str)
TYPES |= {"machine": dict, "versions": dict, "seeds": list, "metrics": dict}


def test_every_record_has_the_schema() -> None:
    for entry in (entry for path in PATHS for entry in record.read_records(path)):
        assert {key: type(value) for key, value in entry.items() if key != "settings"} == TYPES
        assert entry["machine"].keys() >= {"processor", "cores", "threads", "device", "torch"}
        assert all(isinstance(seed, int) for seed in entry["seeds"])
        for row in entry["metrics"].get("rows", []):
            assert all(isinstance(value, int | float | str | list | None) for value in row.values())
        assert " /" not in entry["command"]
        assert re.search(r"/(home|root)/", json.dumps(entry)) is None  # no paths of the machine that measured


def test_the_generated_pages_are_up_to_date() -> None:
    for path, text in pages.pages().items():
        assert path.read_text() == text, "run: python scripts/pages.py"


def test_every_file_of_records_but_the_sweeps_is_on_one_page_none_of_which_is_too_long() -> None:
    assert all(path.stat().st_size < 12_000 for path in record.RESULTS.glob("*.md"))
    sources = [found[2] for path in pages.pages() for found in pages.GENERATED.finditer(path.read_text())]
    assert sorted([*sources, "sweeps.json"]) == sorted([*(path.name for path in PATHS), "lmtrain/config"])


def test_the_log_of_experiments_mentions_every_sweep() -> None:
    log = (record.RESULTS / "LOG.md").read_text()
    assert all(f"`{entry['benchmark']}`" in log for entry in record.read_records(record.RESULTS / "sweeps.json"))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/benchmark", "startup"])
    return tmp_path


def test_a_record_replaces_that_of_the_same_command(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record.write_record("benchmarks", "speed", {"rate": 1.0}, seeds=[1])
    record.write_record("benchmarks", "speed", {"rate": 2.0}, seeds=[1], settings={"dim": 4})
    monkeypatch.setattr(sys, "argv", ["scripts/benchmark", "startup", "--run", "other"])
    record.write_record("benchmarks", "speed", {"rows": [{"rate": 3.0, "compiled": True}, {"rate": 4.0}]}, seeds=[])
    entries = json.loads((results / "benchmarks.json").read_text())
    assert [entry["metrics"].get("rate") for entry in entries] == [2.0, None]
    assert entries[0]["command"] == "python scripts/benchmark startup"
    assert "| rate | compiled |\n| --- | --- |\n| 2 |  |\n| 3 | yes |\n| 4 |  |" in pages.tables("benchmarks.json")


def test_a_record_of_another_machine_or_benchmark_is_kept(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"processor": "x", "cores": 2, "device": "cpu"}
    changes: list[dict[str, object]] = [{}, {"processor": "y"}, {"cores": 4}, {"device": "gpu"}, {}]
    for name, change in [("b", {}), *(("a", change) for change in changes)]:
        monkeypatch.setattr("lmtrain.system.machine.machine", lambda _, found=machine | change: found)
        record.write_record("f", name, {}, seeds=[])
    assert len(record.read_records(results / "f.json")) == 5


def test_a_commit_with_changes_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    git = Mock(side_effect=[" M lmtrain/errors.py", "abc"])
    monkeypatch.setattr(record, "_git", git)
    assert record.find_commit() == "abc+changes"
    assert {"lmtrain", "configs", "scripts", ":!scripts/results"} <= set(git.call_args_list[0].args)
