"""Downloads by the real client from a hub on the loopback interface, in processes that start with its environment."""

import gzip
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha1
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lmtrain.data.hub import _open, _Subset
from tests.data.helpers import parquet
from tests.data.hub_server import TOKEN, Client, Hub, Repository, prepare, serve

Start = Callable[..., Client]


def card(**subsets: str) -> bytes:
    """A card with subsets, each of the files of this pattern."""
    files = [f"- config_name: {name}\n  data_files: {place}\n" for name, place in subsets.items()]
    return f"---\nlicense: [mit, cc0-1.0]\nconfigs:\n{''.join(files)}---\n".encode()


PLAIN = {
    f"data/{split}-00000-of-00001.parquet": parquet([f"{split} row {number}\nsecond" for number in range(1_500)])
    for split in ("train", "validation", "test")
}
PARTS = {
    "README.md": card(
        whole="[{split: train, path: whole/train-*}]",
        lines="[{split: train, path: lines/train-*}, {split: validation, path: 'lines/**/valid-*'}]",
    ),
    "whole/train-0.parquet": parquet([f"whole {number}" for number in range(40)]),
    "lines/train-0.parquet": parquet(["", " = One = \n", " text . \n"]),
    "lines/train-1.parquet": parquet([" = Two = \n"]),
    "lines/held/valid-0.parquet": parquet([" text . \n"]),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def start(home: Path) -> Iterator[Start]:
    pools: list[ProcessPoolExecutor] = []

    def client(**environment: str) -> Client:
        environment = {"HF_HOME": str(home), "HF_TOKEN": TOKEN, **environment}
        pools.append(ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare, initargs=(environment,)))
        return Client(pools[-1], home / "data")

    yield client
    for pool in pools:
        pool.shutdown()


@pytest.fixture(scope="module")
def online(hub: Hub, start: Start) -> Client:
    return start(HF_ENDPOINT=hub.url)


@pytest.fixture(scope="module")
def offline(hub: Hub, start: Start) -> Client:
    return start(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")


def lines(manifest: Any) -> dict[str, int]:
    """The number of lines of each split."""
    return {split: counts["lines"] for split, counts in manifest["splits"].items()}


def test_a_corpus_is_what_the_dataset_holds(hub: Hub, online: Client, home: Path) -> None:
    hub.repositories["own/plain"] = Repository(PLAIN)
    manifest = online("own/plain")
    assert (manifest["source"], manifest["revision"], manifest["license"]) == ("own/plain", "1" * 40, None)
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        text = "".join(f"{name} row {number}\nsecond\n" for number in range(1_500))
        assert (online.dir / "own--plain" / f"{split}.txt").read_text() == text
        assert manifest["splits"][split]["documents"] == 1_500
    assert not list(home.rglob("*.arrow")), "the hub's files are the only copy"
    seen = len(hub.requests)
    online("own/plain", again=False)
    assert len(hub.requests) == seen, "an unchanged corpus needs no request"


def test_splits_that_are_not_used_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, notes: list[str]) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda **_: {"train": "rows", "unsupervised": "others"})
    assert _open("own/reviews", tmp_path, _Subset()) == {"train": "rows"}
    note = "not used in dataset own/reviews, since they are not for training, validation or test: unsupervised"
    assert notes == [note]


def test_a_subset_downloads_only_its_own_files(hub: Hub, online: Client, offline: Client, home: Path) -> None:
    hub.repositories["own/parts"] = Repository(PARTS)
    manifest = online("own/parts", subset="lines")
    assert (lines(manifest), manifest["license"]) == ({"train": 4, "valid": 1}, "mit, cc0-1.0")
    assert not [*home.glob("hub/datasets--own--parts/**/whole/*")]
    assert offline("own/parts", subset="lines")["files"] == manifest["files"]
    assert "own/parts at revision 1111" in (message := offline("own/parts", subset="whole"))
    assert "is not in the cache, and HF_HUB_OFFLINE" in message
    for subset in ("none", None):
        assert "has the subsets whole, lines: set data.subset to one of them" in online("own/parts", subset=subset)


def test_no_more_is_downloaded_than_belongs_to_it(hub: Hub, online: Client, offline: Client) -> None:
    rows = parquet([f"row {number}" for number in range(40)])
    files = {f"{path}.parquet": rows for path in ("mine/train", "mine/test", "yours/train")}
    folders = {"own/folder": "./mine", "own/slash": "mine/"}
    for name, place in folders.items():
        described = card(a=f"[]\n  data_dir: {place}", b="'mine/test*'", c=f"'train*'\n  data_dir: {place}")
        hub.repositories[name] = Repository({"README.md": described, **files})
    seen = len(hub.requests)
    for client in (online, offline):
        for name in folders:
            assert lines(client(name, subset="a")) == {"train": 38, "valid": 2, "test": 40}
            assert lines(client(name, subset="c")) == {"train": 38, "valid": 2}
    assert not [request for request in hub.requests[seen:] if request.endswith("yours/train.parquet")]


def test_without_a_subset_the_default_is_read(hub: Hub, online: Client) -> None:
    """The one of this name, or the one that the card says."""
    files = {f"{name}.parquet": parquet(["row"] * count) for name, count in (("few", 40), ("many", 400))}
    for number, default in enumerate(({"default": "many.*"}, {"two": "many.*\n  default: true"})):
        content = {"README.md": card(one="few.*\n  default: null", **default), **files}
        hub.repositories["own/default"] = Repository(content, commit=f"{number}" * 40)
        assert lines(online("own/default")) == {"train": 380, "valid": 20}


def test_a_known_corpus_has_its_revision_pinned(hub: Hub, online: Client) -> None:
    pinned = "b08601e04326c79dfdd32d625aee71d232d685c3"
    files = {**PARTS, "README.md": PARTS["README.md"].replace(b"config_name: lines", b"config_name: wikitext-2-v1")}
    hub.repositories["Salesforce/wikitext"] = Repository(files, commit=pinned)
    manifest = online("wikitext-2")
    assert (manifest["revision"], manifest["origin"]["subset"]) == (pinned, "wikitext-2-v1")
    assert not [request for request in hub.requests if "Salesforce" in request and "main" in request]


def test_a_branch_moves_and_a_commit_stays(hub: Hub, online: Client, offline: Client) -> None:
    hub.repositories["own/moved"] = Repository(PLAIN)
    old = online("own/moved")
    hub.repositories["own/moved"] = Repository(PARTS | {"README.md": card(default="whole/*")}, commit="3" * 40)
    assert offline("own/moved")["files"] == old["files"]
    new = online("own/moved")
    assert (old["revision"], new["revision"], lines(new)) == ("1" * 40, "3" * 40, {"train": 38, "valid": 2})
    assert offline("own/moved")["files"] == new["files"]
    assert offline("own/moved", revision="1" * 40)["files"] == old["files"]
    assert "at revision v9 doesn't exist: check data.revision" in online("own/moved", revision="v9")


def test_compressed_json_csv_and_text_give_the_same_lines(hub: Hub, online: Client) -> None:
    rows = [f"row {number}, é" for number in range(1_500)]
    for name, content in {
        "train.jsonl.gz": gzip.compress("".join(json.dumps({"text": row}) + "\n" for row in rows).encode()),
        "train.csv": ("text,id\n" + "".join(f'"{row}",1\n' for row in rows)).encode(),
        "train.txt": "".join(f"{row}\n" for row in rows).encode(),
    }.items():
        files = {name: content, name.replace("train", "valid"): content}
        hub.repositories["own/kind"] = Repository(files, commit=sha1(name.encode()).hexdigest())
        assert lines(online("own/kind")) == {"train": 1_500, "valid": 1_500}
        assert (online.dir / "own--kind" / "train.txt").read_text() == "".join(f"{row}\n" for row in rows)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"README.md": b"# nothing here"}, "contain any data files"),
        ({"README.md": b"---\nconfigs: [1]\n---\n"}, "the card of dataset own/wrong can't be read"),
        ({"README.md": b"---\nconfigs: " + b"[" * 5000 + b"\n---\n"}, "the card of dataset own/wrong can't be read"),
        ({"README.md": b"---\nconfigs: [{data_files: data/*}]\n---\n", **PLAIN}, "dataset own/wrong can't be read ("),
        ({"README.md": card(a="/etc/passwd"), **PLAIN}, "names files outside the dataset"),
        ({"README.md": card(a="'file:/etc/passwd'"), **PLAIN}, "names files outside the dataset"),
        ({"README.md": card(a="[]\n  data_dir: ../../.."), **PLAIN}, "names files outside the dataset"),
        ({"test.parquet": parquet(["a"])}, "has the splits test where one for training,"),
        (
            {"README.md": card(a="[{split: train, path: t.*}, {split: dev, path: t.*}, {split: val, path: t.*}]")}
            | {"t.parquet": parquet(["a"])},
            "has the splits train, dev, val where one for training, and at most one each",
        ),
        (
            {"train.parquet": parquet(["a"], "body")},
            "own/wrong, train has no column 'text': name one of its columns ('id', 'body') with data.text_column=NAME",
        ),
        ({"train.parquet": b"PAR1 is how it begins"}, "own/wrong can't be read (ArrowInvalid: "),
        ({"train.jsonl.gz": gzip.compress(b'{"text": "a"}\n')[:-9]}, "own/wrong can't be read (EOFError: "),
        ({"train.jsonl": b'{"text": "a"}\n{"text": null}\n'}, "own/wrong, train, row 2, has nothing (null) in 'text'"),
    ],
)
def test_an_unusable_dataset_is_named(hub: Hub, online: Client, files: dict[str, bytes], message: str) -> None:
    hub.repositories["own/wrong"] = Repository(files, commit=sha1(repr(files).encode()).hexdigest())
    assert message in online("own/wrong")


@pytest.mark.parametrize("other", ["the card of its folder", ".huggingface.yaml", "a second subset of its name"])
def test_only_the_files_of_the_chosen_subset_are_read(hub: Hub, online: Client, tmp_path: Path, other: str) -> None:
    """Whatever files on this machine another description of the dataset names."""
    (tmp_path / "private.txt").write_text("private\n" * 100)
    named = f"data_files: {tmp_path}/*.txt\n".encode()
    text = b"of the dataset\n" * 40
    files = {
        "the card of its folder": {
            "README.md": card(a="[]\n  data_dir: d"),
            "d/README.md": b"---\nconfigs:\n- config_name: default\n  " + named + b"---\n",
            "d/train.txt": text,
        },
        ".huggingface.yaml": {".huggingface.yaml": b"configs:\n- config_name: default\n  " + named, "train.txt": text},
        "a second subset of its name": {
            "README.md": b"---\nconfigs:\n- config_name: a\n- config_name: a\n  " + named + b"---\n",
            "train.txt": text,
        },
    }[other]
    hub.repositories["own/traps"] = Repository(files, commit=sha1(repr(files).encode()).hexdigest())
    found = online("own/traps", subset=None if other.startswith(".") else "a")
    if other == "a second subset of its name":
        assert "names files outside the dataset" in found
    else:
        assert lines(found) == {"train": 38, "valid": 2}


def test_a_dataset_that_cannot_be_downloaded_is_named(hub: Hub, online: Client, offline: Client) -> None:
    assert "dataset own/nosuch is not on the hub" in online("own/nosuch")
    assert "own..x/a can't be the name of a dataset" in online("own..x/a")
    for status, code, message in (
        (401, "", "set HF_TOKEN"),
        (403, "", "ask for access on its page and set HF_TOKEN"),
        (403, "GatedRepo", "ask for access on its page and set HF_TOKEN"),
        (500, "", "returned HTTP 500"),
    ):
        hub.repositories[f"own/down{status}{code}"] = Repository(PLAIN, error=status, code=code)
        assert message in online(f"own/down{status}{code}")
    assert "own/nosuch is not in the cache, and HF_HUB_OFFLINE" in offline("own/nosuch")


def test_a_missing_network_is_named(home: Path, start: Start) -> None:
    with serve() as closed:
        address = closed.url.replace("http://", f"http://user:{TOKEN}@")
    client = start(HF_ENDPOINT=address, HF_HOME=str(home / "other"))
    assert "dataset own/plain was not downloaded (ConnectError): check the network" in client("own/plain")


def test_a_failing_disk_is_named_and_a_bug_stays_a_bug(hub: Hub, online: Client, offline: Client) -> None:
    hub.repositories["own/bug"] = Repository(PLAIN)
    online("own/bug")
    full, denied = OSError(28, "No space left on device"), PermissionError(13, "Permission denied")
    for client, error in ((online, full), (offline, denied)):
        message = client("own/bug", broken=("huggingface_hub.snapshot_download", error))
        assert f"needs a cache that can be read and written ({error.strerror})" in message
    gone = ("datasets.IterableDataset.iter", FileNotFoundError("gone.csv"))
    assert "own/bug can't be read (FileNotFoundError: gone.csv)" in online("own/bug", broken=gone)
    for name in ("huggingface_hub.snapshot_download", "lmtrain.data.local._text_row"):
        for bug in (TypeError("a wrong argument"), KeyError("typo"), ValueError("too many values to unpack")):
            with pytest.raises(type(bug)):
                online("own/bug", broken=(name, bug))
