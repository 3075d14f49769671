"""HF_HUB_OFFLINE: what lmtrain or others left in the cache is taken where it is whole, and the hub isn't asked."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.data.hub_children import COMMIT, PLAIN, Client, convert, parquet
from tests.data.hub_server import Hub, Repository

PARTS = {
    "README.md": b"""---
license: [mit, cc0-1.0]
configs:
- config_name: whole
  data_files:
  - {split: train, path: whole/train-*}
- config_name: lines
  data_files:
  - {split: validation, path: lines/validation-*}
  - {split: train, path: lines/train-*}
---
"""
}
"""A data set of two parts, the second in three files; more below."""

PARTS |= {
    f"{name}.parquet": parquet([f"{name} row {number}" for number in range(99)])
    for name in (
        "whole/train-00000-of-00001",
        "lines/train-00000-of-00002",
        "lines/train-00001-of-00002",
        "lines/validation-00000-of-00001",
    )
}


def test_offline_takes_the_cache_at_the_right_revision(hub: Hub, online: Client, offline: Client) -> None:
    hub.repositories["own/cached"] = Repository(PLAIN)
    first = online.manifest("own/cached")
    seen = len(hub.requests)
    again = offline.manifest("own/cached", revision=COMMIT)
    assert again["files"] == first["files"]
    assert again["revision"] == COMMIT
    assert "has data set own/cached at revision 1111" in offline.sentence("own/cached", revision="2" * 40)
    assert "HF_HUB_OFFLINE" in offline.sentence("own/never")
    assert len(hub.requests) == seen


def test_offline_takes_no_part_for_the_whole(hub: Hub, online: Client, start: Callable[..., Client]) -> None:
    hub.repositories["own/part"] = Repository(PLAIN)
    online.manifest("own/part")
    next(online.dir.parent.glob("hub/datasets--own--part/snapshots/*/data/validation-*")).unlink()
    seen = len(hub.requests)
    offline = start(HF_ENDPOINT=hub.url, HF_DATASETS_OFFLINE="1")  # which the hub's client itself doesn't know
    assert "own/part at revision 1111" in (sentence := offline.sentence("own/part", revision=COMMIT))
    assert "not in the cache" in sentence
    assert len(hub.requests) == seen


def test_offline_takes_what_others_left_in_the_cache(hub: Hub, online: Client, offline: Client) -> None:
    hub.repositories["own/others"] = Repository(PARTS)
    online.fill("own/others", "README.md", "lines/*")
    seen = len(hub.requests)
    first = offline.manifest("own/others", subset="lines")
    assert first["revision"] == COMMIT
    assert first["rows"] == {"train": 198, "valid": 99}
    assert first["licence"] == "mit, cc0-1.0"
    for revision in ("main", COMMIT):
        assert offline.manifest("own/others", subset="lines", revision=revision, force=True)["files"] == first["files"]
    for subset, wanted in (("whole", None), ("lines", "2" * 40), ("lines", "v9")):
        sentence = offline.sentence("own/others", subset=subset, revision=wanted)
        assert "not in the cache, and HF_HUB_OFFLINE" in sentence
    assert len(hub.requests) == seen
    assert online.manifest("own/others", subset="lines", force=True)["files"] == first["files"]
    assert offline.manifest("own/others", subset="lines", force=True)["files"] == first["files"], "with a listing now"


def test_offline_takes_another_commit_that_others_left(hub: Hub, online: Client, offline: Client) -> None:
    repository = hub.repositories["own/moved"] = Repository(PLAIN)
    old = online.manifest("own/moved")
    repository.files, repository.commit = PLAIN | {"data/train-00000-of-00001.parquet": parquet(["new"])}, "3" * 40
    online.fill("own/moved", "data/*", revision="3" * 40)
    assert offline.manifest("own/moved", revision="3" * 40)["rows"] == {"train": 1, "valid": 1_500, "test": 1_500}
    assert offline.manifest("own/moved", force=True)["files"] == old["files"]


def test_offline_takes_a_branch_as_it_was_when_it_was_downloaded(hub: Hub, online: Client, offline: Client) -> None:
    """And without a name what was downloaded last, of whatever branch."""
    repository = hub.repositories["own/branches"] = Repository(PLAIN, branches=("main", "v1", "v2"))
    first = online.manifest("own/branches", revision="v1")
    repository.files, repository.commit = PLAIN | {"data/train-00000-of-00001.parquet": parquet(["new"])}, "3" * 40
    second = online.manifest("own/branches", revision="v2")
    assert (first["revision"], second["revision"]) == (COMMIT, "3" * 40)
    for revision, wanted in (("v1", first), ("v2", second), (None, second)):
        found = offline.manifest("own/branches", revision=revision, force=True)
        assert [found[key] for key in ("revision", "rows", "files")] == [
            wanted[key] for key in ("revision", "rows", "files")
        ]
    assert "not in the cache" in offline.sentence("own/branches", revision="v3")


def test_offline_notices_what_others_did_not_leave(hub: Hub, online: Client, offline: Client) -> None:
    for number, lacking in enumerate(name for name in PARTS if not name.startswith("whole")):
        hub.repositories[f"own/lacks{number}"] = Repository(PARTS)
        (online.fill(f"own/lacks{number}", "*") / lacking).unlink()
        assert "not in the cache, and HF_HUB_OFFLINE" in offline.sentence(f"own/lacks{number}", subset="lines")
        if lacking.startswith("lines"):
            assert offline.manifest(f"own/lacks{number}", subset="whole")["rows"] == {"train": 99}


def test_offline_compares_what_others_left_with_its_hash(hub: Hub, online: Client, offline: Client) -> None:
    hub.repositories["own/rotten"] = Repository(PARTS)
    path = online.fill("own/rotten", "*") / "lines/train-00001-of-00002.parquet"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"row 33", b"row XX"))
    assert path.read_bytes() != content
    sentence = offline.sentence("own/rotten", subset="lines")
    assert "lines/train-00001-of-00002.parquet of data set own/rotten arrived damaged" in sentence
    path.write_bytes(content)
    assert offline.manifest("own/rotten", subset="lines")["rows"]["train"] == 198


def test_offline_takes_what_was_converted_to_arrow(hub: Hub, online: Client, offline: Client) -> None:
    hub.repositories["own/Arrow"] = Repository(PARTS)
    online.pool.submit(convert, "own/Arrow", "lines").result()
    first = offline.manifest("own/Arrow", subset="lines")
    shutil.rmtree(online.dir.parent / f"hub/datasets--own--Arrow/snapshots/{COMMIT}/lines")
    again = offline.manifest("own/Arrow", subset="lines", force=True)
    assert (again["files"], again["revision"]) == (first["files"], COMMIT)
    shutil.rmtree(online.dir.parent / "datasets")
    assert "not in the cache" in offline.sentence("own/Arrow", subset="lines", force=True)


def test_offline_refuses_files_that_are_not_the_data_sets_own(
    hub: Hub, online: Client, offline: Client, home: Path
) -> None:
    (home / "private-train.txt").write_text("a secret")
    for number, path in enumerate((f"{home}/private-*", "../../../../private-*", "../../../../private-train.txt")):
        card = f"---\nconfigs:\n- config_name: default\n  data_files: {path}\n---\n"
        hub.repositories[f"own/nosy{number}"] = Repository({"README.md": card.encode(), **PLAIN})
        online.fill(f"own/nosy{number}", "*")
        assert "subpath" in offline.sentence(f"own/nosy{number}", subset="default")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {hub.url}/private-train.txt\n---\n"
    hub.repositories["own/caller"] = Repository({"README.md": card.encode(), **PLAIN})
    online.fill("own/caller", "*")
    seen = len(hub.requests)
    assert "names files by address" in offline.sentence("own/caller")
    assert len(hub.requests) == seen


def test_offline_reads_files_of_other_kinds(hub: Hub, online: Client, offline: Client) -> None:
    lines = "".join(f'{{"text": "row {number}"}}\n' for number in range(99)).encode()
    hub.repositories["own/jsonl"] = Repository({"train.jsonl": lines, "test.jsonl": lines, "dev.jsonl": lines})
    online.manifest("own/jsonl")
    rows = offline.manifest("own/jsonl", revision=COMMIT, force=True)["rows"]
    assert rows == {"train": 99, "valid": 99, "test": 99}
