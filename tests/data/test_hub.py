"""Downloads for real, against a hub on the loopback interface, in child processes that start with its environment."""

import gzip
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.data.hub_children import COMMIT, PLAIN, Client, parquet
from tests.data.hub_server import Hub, Repository, serve

CARD = b"""---
license: [mit, cc0-1.0]
configs:
- config_name: lines
  data_files:
  - {split: train, path: lines/train.parquet}
  - {split: validation, path: lines/validation.parquet}
- config_name: whole
  data_files:
  - {split: train, path: whole/train.parquet}
---
"""


def test_parquet_splits(hub: Hub, online: Client) -> None:
    hub.repositories["own/plain"] = Repository(PLAIN)
    manifest = online.manifest("own/plain")
    assert manifest["source"] == "own/plain"
    assert manifest["revision"] == COMMIT
    assert manifest["licence"] == "cc0-1.0"
    assert manifest["rows"] == {"train": 1_500, "valid": 1_500, "test": 1_500}
    assert list(manifest["splits"]) == ["train", "valid", "test"]
    for split, counts in manifest["splits"].items():
        rows = {"train": "train", "valid": "validation", "test": "test"}[split]
        text = "".join(f"{rows} row {number}\nsecond line\n" for number in range(1_500))
        assert (online.dir / "own--plain" / f"{split}.txt").read_text() == text
        assert counts == {"lines": 3_000, "words": 7_500, "bytes": len(text), "documents": 1_500}


def test_unchanged_asks_the_hub_for_nothing(hub: Hub, online: Client) -> None:
    hub.repositories["own/once"] = Repository(PLAIN)
    online.manifest("own/once")
    seen = len(hub.requests)
    online.manifest("own/once")
    assert len(hub.requests) == seen
    online.manifest("own/once", revision="main")
    assert len(hub.requests) > seen


def test_subset_from_the_card(hub: Hub, online: Client) -> None:
    lines = ["", " = One = \n", "", " text . \n", "", " = Two = \n", "", " more text . \n"]
    files = {
        "lines/train.parquet": parquet(lines),
        "lines/validation.parquet": parquet(lines),
        "whole/train.parquet": parquet([f"text {number}" for number in range(40)]),
    }
    hub.repositories["own/parts"] = Repository({"README.md": CARD, **files}, licence=None)
    manifest = online.manifest("own/parts", subset="lines")
    assert manifest["splits"]["train"] == {"lines": 8, "words": 11, "bytes": 47, "documents": 2}
    assert manifest["subset"] == "lines"
    manifest = online.manifest("own/parts", subset="whole")
    assert {split: counts["lines"] for split, counts in manifest["splits"].items()} == {"train": 38, "valid": 2}
    assert "data.subset=None" in (sentence := online.sentence("own/parts"))
    assert "['lines', 'whole']" in sentence
    assert "['lines', 'whole']" in online.sentence("own/parts", subset="nosuch")


def test_wikitext_is_pinned_and_has_its_licence(hub: Hub, online: Client) -> None:
    card = CARD.replace(b"config_name: lines", b"config_name: wikitext-2-v1")
    files = {f"lines/{split}.parquet": parquet([" text . \n"]) for split in ("train", "validation")}
    pinned = "b08601e04326c79dfdd32d625aee71d232d685c3"
    hub.repositories["Salesforce/wikitext"] = Repository({"README.md": card, **files}, commit=pinned, branches=())
    manifest = online.manifest("wikitext-2")
    assert (manifest["revision"], manifest["subset"]) == (pinned, "wikitext-2-v1")
    assert manifest["licence"] == "CC BY-SA 3.0 and GFDL"


def test_unknown_id_and_unknown_revision(hub: Hub, online: Client) -> None:
    hub.repositories["own/known"] = Repository(PLAIN)
    assert "own/nosuch is not on the hub" in online.sentence("own/nosuch")
    assert "own/known has no revision v9" in online.sentence("own/known", revision="v9")
    assert "own/known has no revision" in online.sentence("own/known", revision="2" * 40)


@pytest.mark.parametrize("status", [401, 403])
def test_gated(hub: Hub, online: Client, status: int) -> None:
    hub.repositories[f"own/gated{status}"] = Repository(PLAIN, refuses=status)
    assert "set HF_TOKEN" in online.sentence(f"own/gated{status}")


def test_server_error(hub: Hub, online: Client) -> None:
    hub.repositories["own/down"] = Repository(PLAIN, refuses=500)
    assert "try again" in online.sentence("own/down")


def test_connection_that_breaks_once_is_taken_up_again(hub: Hub, online: Client) -> None:
    hub.repositories["own/flaky"] = Repository(PLAIN, breaks=1)
    assert online.manifest("own/flaky")["rows"]["train"] == 1_500
    assert hub.repositories["own/flaky"].breaks == 0


def test_connection_that_keeps_breaking(hub: Hub, online: Client) -> None:
    repository = hub.repositories["own/broken"] = Repository(PLAIN, breaks=1_000)
    assert "the download of data set own/broken failed" in online.sentence("own/broken")
    assert not (online.dir / "own--broken").exists()
    repository.breaks = 0
    assert online.manifest("own/broken")["rows"]["train"] == 1_500


def test_wrong_content_is_named_and_force_heals_it(hub: Hub, online: Client) -> None:
    pages = {path: b"<html>please log in</html>".ljust(len(content)) for path, content in PLAIN.items()}
    repository = hub.repositories["own/wrong"] = Repository(pages, announced=PLAIN)
    assert "data/validation-00000-of-00001.parquet of data set own/wrong arrived damaged" in online.sentence(
        "own/wrong"
    )
    repository.files = PLAIN
    assert online.manifest("own/wrong", force=True)["rows"]["train"] == 1_500


def test_what_the_disk_has_no_room_for_is_refused_before_it_is_fetched(hub: Hub, online: Client) -> None:
    repository = hub.repositories["own/huge"] = Repository(PLAIN, says_bytes=10**18)
    sentence = online.sentence("own/huge")
    assert "own/huge has 3,000,000,000.0 GB to download" in sentence
    assert "set HF_HOME" in sentence
    repository.says_bytes = None
    assert online.manifest("own/huge")["rows"]["train"] == 1_500
    repository.says_bytes = 10**18
    shutil.rmtree(online.dir / "own--huge")
    assert online.manifest("own/huge")["rows"]["train"] == 1_500, "all of it is in the cache"


def test_content_of_another_size(hub: Hub, online: Client) -> None:
    page = b"<html>please log in</html>"
    repository = hub.repositories["own/short"] = Repository(dict.fromkeys(PLAIN, page), announced=PLAIN)
    assert "the download of data set own/short failed" in online.sentence("own/short")
    repository.files = PLAIN
    assert online.manifest("own/short")["rows"]["train"] == 1_500


def test_content_of_another_hash_is_named_and_force_heals_it(hub: Hub, online: Client) -> None:
    other = {path: parquet([f"{path[5]} row {number}" for number in range(9)]) for path in PLAIN}
    changed = {path: content.replace(b"row 3", b"row X") for path, content in other.items()}
    assert changed != other
    repository = hub.repositories["own/damaged"] = Repository(changed, announced=other)
    assert "validation-00000-of-00001.parquet of data set own/damaged arrived damaged" in online.sentence("own/damaged")
    repository.files = other
    online.manifest("own/damaged", force=True)
    assert "row 3" in (online.dir / "own--damaged" / "train.txt").read_text()


def test_no_data_files_no_train_no_column(hub: Hub, online: Client) -> None:
    hub.repositories["own/empty"] = Repository({"README.md": b"# nothing here"})
    hub.repositories["own/testonly"] = Repository({"test.parquet": parquet(["a"])})
    hub.repositories["own/column"] = Repository({"train.parquet": parquet(["a"], "body")})
    assert "no data files of a known kind" in online.sentence("own/empty")
    assert "no train split (it has test)" in online.sentence("own/testonly")
    assert (
        "no column 'text': set data.text_column or --text-column to one of its columns (id, body)"
        in online.sentence("own/column")
    )
    assert "row 1, has int in 'id'" in online.sentence("own/column", text_column="id")
    splits = ("train", "dev", "validation")
    places = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in splits)
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{places}---\n".encode()
    files = {f"{name}.parquet": parquet([name]) for name in splits}
    hub.repositories["own/twice"] = Repository({"README.md": card, **files})
    assert "own/twice has one split under several names (dev, validation)" in online.sentence("own/twice")


def files_of(online: Client, name: str) -> set[str]:
    """The content that the hub's cache has of a data set, by what it is named there."""
    return {path.name for path in online.dir.parent.glob(f"hub/datasets--own--{name}/blobs/*")}


def test_nothing_is_kept_but_the_hubs_own_files(hub: Hub, online: Client) -> None:
    hub.repositories["own/copies"] = Repository(PLAIN)
    online.manifest("own/copies")
    assert files_of(online, "copies") == {sha256(content).hexdigest() for content in PLAIN.values()}
    assert not list(online.dir.parent.rglob("*.arrow"))


def test_where_room_is_short_each_file_goes_when_it_has_been_read(hub: Hub, online: Client) -> None:
    shards = {f"data/train-0000{number}-of-00003.parquet": parquet([f"row {number}"] * 9) for number in range(3)}
    files = {name: content for name, content in PLAIN.items() if "train" not in name} | shards
    damaged = {name: content.replace(b"row 3", b"row X") for name, content in files.items()}
    kept, passing = Repository(files), Repository(damaged, announced=files)
    passing.says_bytes = shutil.disk_usage(online.dir.parent).free // 10
    hub.repositories |= {"own/kept": kept, "own/passing": passing}
    first = online.manifest("own/kept")
    assert "validation-00000-of-00001.parquet of data set own/passing arrived damaged" in online.sentence("own/passing")
    passing.files = files
    begun = len(hub.requests)
    assert online.manifest("own/passing", force=True)["files"] == first["files"]
    fetched = [path.rpartition("/")[2] for path in hub.requests[begun:] if path.startswith("GET /datasets/")]
    assert fetched == [f"{name}-of-00001.parquet" for name in ("validation-00000", "test-00000")] + [
        Path(name).name for name in shards
    ]
    assert len(files_of(online, "kept")) == 5
    assert files_of(online, "passing") == set()


def test_files_of_other_kinds(hub: Hub, online: Client) -> None:
    rows = [f"row {number}, é\nsecond" for number in range(1_500)]
    lines = [f"row {number}" for number in range(1_500)]
    kinds = {
        "jsonl": ("train.jsonl.gz", gzip.compress("".join(json.dumps({"text": row}) + "\n" for row in rows).encode())),
        "csv": ("train.csv", ("text,id\n" + "".join(f'"{row}",1\n' for row in rows)).encode()),
        "txt": ("train.txt", "".join(f"{line}\r\n" for line in lines).encode()),
    }
    for kind, (name, content) in kinds.items():
        expected = "".join(f"{row}\n" for row in (lines if kind == "txt" else rows))
        held_out = {name.replace("train", "test"): content, name.replace("train", "dev"): content}
        hub.repositories[f"own/{kind}"] = Repository({name: content, **held_out})
        manifest = online.manifest(f"own/{kind}")
        assert manifest["rows"] == dict.fromkeys(("train", "valid", "test"), 1_500)
        assert (online.dir / f"own--{kind}" / "train.txt").read_text() == expected
    hub.repositories["own/nojson"] = Repository({"train.jsonl": b'{"text": "a"}\n{"text"'})
    assert "own/nojson has a file that can't be read" in online.sentence("own/nojson")
    hub.repositories["own/nocolumn"] = Repository({"train.jsonl": b'{"body": "a"}\n'})
    assert "no column 'text': set data.text_column" in online.sentence("own/nocolumn")


def test_files_that_are_not_the_data_sets_own_are_refused(hub: Hub, online: Client, home: Path) -> None:
    (home / "private.txt").write_text("a secret")
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {home}/private.txt\n---\n"
    hub.repositories["own/reader"] = Repository({"README.md": card.encode(), **PLAIN})
    assert "own/reader" in online.sentence("own/reader")


def test_no_network(home: Path, start: Callable[..., Client]) -> None:
    with serve() as closed:
        address = closed.url
    secret = address.replace("http://", "http://user:hf_canaryTOKEN@")
    sentence = start(HF_ENDPOINT=secret, HF_HOME=str(home / "other")).sentence("own/plain", revision=COMMIT)
    assert "the download of data set own/plain at revision 1111" in sentence
    assert "check the network" in sentence


def climbing(home: Path, name: str) -> list[str]:
    """Ways to a place above the cache, from the folders that a file could be meant for, and from anywhere."""
    return [*("../" * steps + f"{name}-{steps}" for steps in range(2, 6)), f"{home.parent}/{name}"]


def outside(home: Path) -> set[Path]:
    """What lies beside the cache and the data folder."""
    inside = {home / name for name in ("hub", "datasets", "data", "lmtrain", "xet", "modules")}
    return {path for path in home.parent.rglob("*") if not inside & {path, *path.parents}}


def test_files_with_names_that_climb_are_kept_in_the_cache(hub: Hub, online: Client, home: Path) -> None:
    before = outside(home)
    for number, name in enumerate(climbing(home, "train.parquet")):
        hub.repositories[f"own/climb{number}"] = Repository({name: parquet(["escaped"])})
        online.sentence(f"own/climb{number}")
        hub.repositories[f"own/both{number}"] = Repository({**PLAIN, name: parquet(["escaped"])})
        online.attempt(f"own/both{number}")
    assert outside(home) == before


def test_hashes_and_commits_that_climb_are_kept_in_the_cache(hub: Hub, online: Client, home: Path) -> None:
    before = outside(home)
    for number, name in enumerate(climbing(home, "escaped")):
        hub.repositories[f"own/etag{number}"] = Repository(PLAIN, etag=name)
        assert "no file name" in online.sentence(f"own/etag{number}")
        hub.repositories[f"own/commit{number}"] = Repository(PLAIN, says_commit=name)
        online.attempt(f"own/commit{number}")
    assert outside(home) == before
