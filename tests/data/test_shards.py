"""Tokenizing in shards: what they hold joined, which process writes them, and what a killed process leaves."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmtrain.data import processes, shards, tokenizing
from lmtrain.data.shards import Count, cut, lines_of
from lmtrain.data.tokenizer_file import Kind
from lmtrain.data.tokens import TokenStore, open_store
from lmtrain.errors import LmtrainError
from lmtrain.storage.files import MANIFEST
from tests.data.helpers import CONFIGS, KINDS, Documents, flip, make_corpus, make_store, token_starts, tokenized

LINES = [f"line {number} says {number % 7} times é" for number in range(400)]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 2_000)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 1)


def documents(count: int = 4) -> Documents:
    return {"train": [part.tolist() for part in np.array_split(np.array(LINES), count)], "valid": [["line 3"]]}


def ids_of(store: TokenStore, split: str = "train") -> list[int]:
    found: list[int] = store.split(split).ids[:].tolist()
    return found


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.npy")}


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(st.lists(st.text("ab é<eos>"), min_size=1), min_size=1),
    size=st.integers(1, 12),
    kind=st.sampled_from(KINDS),
)
def test_the_size_of_shards_changes_nothing_but_the_files(
    texts: list[list[str]], size: int, kind: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("store")
    whole = make_store(folder / "whole", kind, {"train": texts})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "SHARD_BYTES", size)
        patch.setattr(processes, "cores", lambda: 1)
        parts = make_store(folder / "parts", kind, {"train": texts})
    assert ids_of(parts) == ids_of(whole)
    assert token_starts(parts, "train") == token_starts(whole, "train")
    assert parts.split("train").ids.dtype == whole.split("train").ids.dtype
    assert len(parts.manifest["splits"]["train"]["shards"]) >= min(len("".join(map("".join, texts))) // 99, 2)


def test_pieces_are_whole_lines_and_all_of_the_text(tmp_path: Path, small_shards: None) -> None:
    corpus = make_corpus(tmp_path / "tiny", documents())
    pieces = cut(corpus.folder / "train.txt")
    assert len(pieces) > 4
    assert [line for piece in pieces for line in lines_of(piece)] == [f"{line}\n" for line in LINES]
    assert [piece.first_line for piece in pieces] == np.cumsum([0, *(piece.lines for piece in pieces[:-1])]).tolist()
    assert all(sum(len(line.encode()) for line in lines_of(piece, 300)) < 350 for piece in pieces)


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_processes_write_what_one_process_writes(
    kind: Kind, tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)
    together = make_store(tmp_path / "together", kind, documents())
    monkeypatch.setattr(processes, "cores", lambda: 1)
    assert make_store(tmp_path / "one", kind, documents()).sha256 == together.sha256
    assert len(list(together.folder.glob("train-*.docs.npy"))) > 4


SCRIPT = """
import sys
from pathlib import Path
from lmtrain.data import processes, shards
from lmtrain.data.corpus import open_corpus
from lmtrain.data.tokenizing import tokenize
from lmtrain.config.schema import TokenizerConfig

shards.SHARD_BYTES, folder = 2000, Path(sys.argv[1])
processes.cores = lambda: 1
written, finish = 0, shards.write_file

def slowly(path, content):
    global written
    finish(path, content)
    if path.suffix == ".json":
        print(path.name, flush=True)
        written += 1
        if written == 3:
            sys.stdin.read()

shards.write_file = slowly
tokenize([open_corpus(folder / "tiny")], TokenizerConfig(), folder, note=lambda _: None, progress=False)
"""


def killed(folder: Path) -> Path:
    """Kill a process that has finished three shards; the folder where they are."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline().endswith(".json\n")
    process.kill()
    process.communicate()
    (parts,) = folder.glob(".parts-*")
    return parts


def again(folder: Path, notes: list[str]) -> TokenStore:
    return tokenized(make_corpus(folder / "tiny", documents()), CONFIGS["word"], notes.append)


def test_a_killed_process_is_resumed(tmp_path: Path, small_shards: None, one_core: None) -> None:
    whole = make_store(tmp_path / "whole", "word", documents())
    make_corpus(tmp_path / "tiny", documents())
    parts = killed(tmp_path)
    finished = files_of(parts)
    assert len(finished) == 6
    (parts / "train-00004.half").write_bytes(b"half of it")
    tokenizer = (parts / "tokenizer.json").read_bytes()
    notes: list[str] = []
    store = again(tmp_path, notes)
    assert "resuming" in notes[0]
    assert files_of(store.folder).items() >= finished.items()
    assert (store.folder / "tokenizer.json").read_bytes() == tokenizer
    assert store.sha256 == whole.sha256
    assert (store.folder / MANIFEST).read_text() == (whole.folder / MANIFEST).read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", store.folder.name, "whole"]


@pytest.mark.parametrize("end", [".npy", ".docs.npy", ".json"])
def test_only_a_damaged_shard_is_made_again(tmp_path: Path, small_shards: None, one_core: None, end: str) -> None:
    whole = make_store(tmp_path / "whole", "word", documents())
    make_corpus(tmp_path / "tiny", documents())
    parts = killed(tmp_path)
    finished = files_of(parts)
    flip(parts / f"train-00001{end}", 0 if end == ".json" else -1)
    store = again(tmp_path, [])
    assert store.sha256 == whole.sha256
    kept = {name for name, state in files_of(store.folder).items() if finished.get(name) == state}
    assert kept == {f"train-0000{number}{end}" for number in (0, 2) for end in (".npy", ".docs.npy")}


def test_another_text_finds_no_shards_to_resume_from(tmp_path: Path, small_shards: None, one_core: None) -> None:
    make_corpus(tmp_path / "tiny", documents())
    parts = killed(tmp_path)
    corpus = make_corpus(tmp_path / "tiny", documents(3))
    store = tokenized(corpus, CONFIGS["word"])
    assert not parts.exists()
    assert store.sha256 == make_store(tmp_path / "whole", "word", documents(3)).sha256


KILLED = """
import os, signal, sys
from pathlib import Path
from lmtrain.data import processes, shards
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.shards import encoding_tasks

shards.SHARD_BYTES, text = 1 << 20, Path(sys.argv[1])
tokenizer = Tokenizer.load(text.with_name("tokenizer.json"))
tasks = encoding_tasks("train", [text], tokenizer, text.parent)
list(processes.perform_all(tasks, lambda _: os.kill(os.getpid(), signal.SIGKILL), 2))
"""


def test_ctrl_c_reaches_no_worker() -> None:
    """Not even one that has just been started, and could not ignore it yet."""
    worker = processes._start()
    try:
        assert os.getpgid(worker.pid) == worker.pid != os.getpgid(0)
    finally:
        worker.kill()
        worker.communicate()


def test_the_workers_of_a_killed_process_end_without_a_message(tmp_path: Path) -> None:
    """Each is in the middle of a shard then, and nobody reads its messages any more."""
    make_store(tmp_path, "word", {"train": [LINES]}).tokenizer.save(tmp_path / "tiny/tokenizer.json")
    text = tmp_path / "tiny/train.txt"
    text.write_text("".join(f"{line}\n" for line in LINES) * 400)
    command = [sys.executable, "-c", KILLED, str(text)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )  # returns when the last ends
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert not list(text.parent.glob("train-*.json"))


def test_a_worker_that_dies_is_an_error(tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)
    monkeypatch.setattr(processes, "_START", "import os; os._exit(9)")
    with pytest.raises(LmtrainError, match=r"train\.txt was killed.*finished shards are kept"):
        make_store(tmp_path, "word", documents())
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_few_results_wait_for_the_caller(tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Count] = []

    def ask(_worker: object, task: Count, _told: object) -> dict[str, int]:
        done.append(task)
        return {"number": len(done)}

    child = [sys.executable, "-c", "input()"]
    monkeypatch.setattr(processes, "_start", lambda: subprocess.Popen(child, stdin=PIPE, stdout=PIPE, text=True))
    monkeypatch.setattr(processes, "_ask", ask)
    corpus = make_corpus(tmp_path / "tiny", {"train": [LINES * 5], "valid": [["line 3"]]})
    tasks = [Count(piece) for piece in cut(corpus.folder / "train.txt")]
    assert len(tasks) > 20
    results = processes.perform_all(tasks, lambda _: None, 2)
    next(results)
    time.sleep(0.1)
    assert len(done) <= 4
    assert len(list(results)) == len(tasks) - 1
    assert sorted(done, key=tasks.index) == tasks


def test_the_error_of_a_worker_is_raised(tmp_path: Path, small_shards: None) -> None:
    corpus = make_corpus(tmp_path / "tiny", documents())
    tasks = [Count(piece) for piece in cut(corpus.folder / "train.txt")]
    (corpus.folder / "train.txt").unlink()
    with pytest.raises(LmtrainError, match=r"train\.txt can't be read"):
        list(processes.perform_all(tasks, lambda _: None, 2))


def test_rare_words_are_dropped_where_there_are_too_many(
    tmp_path: Path, small_shards: None, one_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "MOST_WORDS", 60)
    store = make_store(tmp_path, "word", documents())
    assert store.tokenizer.vocab_size < 150
    assert all(store.tokenizer.knows(word) for word in ("line", "says", "times", "é", "0", "6"))


def test_merges_of_a_large_text_are_learned_from_a_part(
    tmp_path: Path, small_shards: None, one_core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizing, "BPE_BYTES", 1_000)
    notes: list[str] = []
    corpus = make_corpus(tmp_path / "tiny", documents())
    store = tokenized(corpus, CONFIGS["bpe"], notes.append)
    assert any("learned from" in note and "of the text" in note for note in notes)
    text = store.tokenizer.decode([index for index in ids_of(store) if index != store.tokenizer.eos_id])
    assert text == "".join(f"{line}\n" for line in LINES)


def test_a_missing_shard_is_rejected(tmp_path: Path, small_shards: None, one_core: None) -> None:
    store = make_store(tmp_path, "word", documents())
    (store.folder / "train-00001.npy").unlink()
    with pytest.raises(LmtrainError, match=r"train-00001\.npy is missing"):
        open_store(store.folder)


GROWTH = """
import sys
from pathlib import Path
from lmtrain.data import processes, shards, tokenizing
from lmtrain.data.corpus import download
from lmtrain.config.schema import DataConfig, TokenizerConfig

shards.SHARD_BYTES = 1 << 20
processes.cores = lambda: 1
folder, kind = Path(sys.argv[1]), sys.argv[2]
data = DataConfig(source=str(folder / "text"), dir=folder / "data")
corpus = download(data)
tokenizing.open_store = lambda *_: None
config = TokenizerConfig(kind=kind, vocab_size=300 if kind == "bpe" else None)
tokenizing.tokenize([corpus], config, data.dir, note=lambda _: None, progress=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak(folder: Path, megabytes: int, kind: str) -> int:
    (folder / "text").mkdir(parents=True)
    for split, size in (("train", megabytes << 20), ("valid", 1 << 10)):
        (folder / "text" / f"{split}.txt").write_text("some words of a line that come again and again\n" * (size // 47))
    command = [sys.executable, "-c", GROWTH, str(folder), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shutil.rmtree(folder)
    return int(done.stdout) << 10


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """The text grows by 10 MiB, its ids by 4."""
    small, large = peak(tmp_path / "small", 2, "word"), peak(tmp_path / "large", 12, "word")
    assert large - small < 3 << 20
