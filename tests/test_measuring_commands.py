"""The measurements of data, decoding and start-up on sizes that take no time, and how the scripts end."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import data_speed
import decoding_speed
import first_token
import large_corpus
import pytest
import record
import torch

from lmtrain.config.schema import ModelConfig
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.steps import steps
from tests.children import Child
from tests.conftest import TINY, Lmtrain

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "scripts" / "results").glob("*.json"))
COMMANDS = {path.stem: shlex.split(json.loads(path.read_text())["command"]) for path in RECORDS}
BENCHMARKS = {stem: command[2:] for stem, command in COMMANDS.items() if command[1] == "scripts/benchmark"}

pytestmark = pytest.mark.usefixtures("one_thread")


def test_tokenizing_is_timed_over_the_whole_corpus(monkeypatch: pytest.MonkeyPatch, data_dir: Path) -> None:
    sizes = {"REPEATS": 2, "LINES": 50, "WINDOWS": 2, "CONTEXTS": (8, 16), "BATCHES": 2}
    for name, value in sizes.items():
        monkeypatch.setattr(data_speed, name, value)
    figures = data_speed.data([*TINY, f"data.dir={data_dir}"])
    (folder,) = (path for path in data_dir.glob("sample-3000*") if (path / "train.txt").is_file())
    texts = {path.stem: path.stat().st_size for path in folder.glob("*.txt")}
    assert texts.keys() == {"train", "valid", "test"}
    for kind in ("word", "bpe"):
        times = figures[kind]["seconds"]
        assert len(times["store"]) == len(times["tokenizers"]) == 2
        assert figures[kind]["store"] * min(times["store"]) == pytest.approx(sum(texts.values()))
        assert figures[kind]["tokenizers"] * min(times["tokenizers"]) == pytest.approx(texts["train"])
    assert figures["batch_seconds"].keys() == {"8", "16"}
    assert f"{sum(texts.values()) / 1e6:.1f} MB of sample-3000" in figures["title"]


SMALL_SHARDS = """
import sys, time
from lmtrain.data import processes, shards
shards.SHARD_BYTES = 20_000
perform = processes.perform
def slowly(*given):
    time.sleep(0.05)
    return perform(*given)
processes.perform, processes.cores = slowly, lambda: 1
from lmtrain.__main__ import main
main()
"""
"""lmtrain, whose work on a small text can be broken off in the middle."""


@pytest.fixture
def gigabytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lmtrain: Lmtrain) -> float:
    """The size of a corpus that takes no time, in shards to match; training on it is profiled in this process."""

    def profile(*arguments: str) -> dict[str, Any]:
        assert set(arguments) > {"train", "--profile"}
        tiny = [text for text in TINY if text.startswith(("model.", "train.threads", "train.device"))]
        lmtrain("--version")  # and what was printed before is read
        done = lmtrain(*arguments, *tiny, "--json")
        assert done.code == 0, done.err
        assert "training a bpe tokenizer" not in done.err  # the store that was made is the one that is read
        result: dict[str, Any] = json.loads(done.out)
        return result

    sizes = {"FILE_BYTES": 150_000, "WORDS": 300, "DRAWN_AT_ONCE": 6000, "READ_BATCHES": 150, "POLL_SECONDS": 0.01}
    for name, value in sizes.items():
        monkeypatch.setattr(large_corpus, name, value)
    monkeypatch.setattr(large_corpus, "SHARD_BYTES", 20_000)
    monkeypatch.setattr(large_corpus, "LMTRAIN", ("-c", SMALL_SHARDS))
    monkeypatch.setattr(large_corpus, "ProcessPoolExecutor", ThreadPoolExecutor)  # a fork would warn of threads
    monkeypatch.setattr(large_corpus, "lmtrain", profile)
    monkeypatch.setattr(data_speed, "BATCHES", 2)
    monkeypatch.setattr(
        "lmtrain.system.allocator.retain_heap", lambda: None
    )  # this process would keep what later tests free
    monkeypatch.chdir(tmp_path)
    return 3e-4


def test_a_large_corpus_is_killed_on_the_way_and_read(gigabytes: float, tmp_path: Path) -> None:
    figures = large_corpus.large_corpus(gigabytes)
    commands = figures["commands"]
    assert all(command["peak_bytes"] > 10e6 for command in commands.values())
    assert figures["shards_kept"] >= 0.4 * figures["bytes"] / 20_000
    assert f"killed after {figures['shards_kept']} " in figures["title"]
    assert figures["bytes"] >= 1e9 * gigabytes
    assert 0.15 < figures["tokens"] / figures["bytes"] < 0.5
    assert 0 < figures["profile"]["parts"]["data"] < sum(figures["profile"]["parts"].values())
    assert not list(tmp_path.iterdir())


def test_a_corpus_too_small_to_be_killed_is_refused(gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_corpus, "watched", lambda options, enough: {})
    with pytest.raises(SystemExit, match=r"^0\.00 GB were ids before .* give more gigabytes$"):
        large_corpus.large_corpus(gigabytes)


class Gpt2(torch.nn.Module):
    """A double of transformers' model: `generate` appends zeros."""

    def generate(self, prompts: torch.Tensor, **options: Any) -> torch.Tensor:
        assert options["max_new_tokens"] == options["min_new_tokens"]
        return torch.nn.functional.pad(prompts, (0, options["max_new_tokens"]))


def test_decoding_is_measured_in_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    double = SimpleNamespace(
        GPT2Config=dict,
        GPT2LMHeadModel=lambda config: Gpt2(),
        logging=SimpleNamespace(set_verbosity_error=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "transformers", double)
    monkeypatch.setattr(decoding_speed, "version", lambda name: "5.0")
    monkeypatch.setattr(decoding_speed, "steps", lambda model, compiled=False: steps(model))
    sizes = {"VOCABULARY": 50, "SIZES": ((16, 1, 2),), "BATCHES": (1, 2), "BEAMS": (1, 2), "TRIED": 2}
    for name, value in {**sizes, "REPEATS": 1, "READ": 2**20}.items():
        monkeypatch.setattr(decoding_speed, name, value)
    figures = decoding_speed.decoding(3, torch.device("cpu"))
    cases = [(case["new_tokens"], case["batch"], case["beams"]) for case in figures["cases"]]
    assert cases == [(3, 1, 1), (3, 1, 2), (3, 2, 1), (3, 2, 2)]
    for case in figures["cases"]:
        assert case["ratio"] == pytest.approx(case["tokens_per_second"] / case["their_tokens_per_second"])
        assert case["fp32_form"].startswith("fp32")
        assert case["compiling_seconds"].keys() >= {"fp32 compiled", "int8 compiled"}
    model = LanguageModel(ModelConfig(dim=16, layers=1, heads=2), 50)
    read = sum(x.numel() for x in model.parameters() if x.dim() == 2)
    assert figures["floors"]["16"]["bytes"] == {"fp32": 4 * read, "bf16": 2 * read, "int8": read}


def test_the_first_token_is_timed_by_its_parts(
    monkeypatch: pytest.MonkeyPatch, workdir: Path, lmtrain: Lmtrain
) -> None:
    called = []

    def median(program: str, *arguments: str) -> float:
        called.append(Path(program).name)
        done = lmtrain(*arguments) if called[-1] == "lmtrain" else None
        assert done is None or (done.code == 0 and done.out.startswith("In 1950, the")), done
        return 3.0

    monkeypatch.setattr(first_token, "STARTS", 1)
    monkeypatch.setattr(first_token, "_median", median)
    run = next((workdir / "runs").iterdir())
    begun = time.perf_counter()
    figures = first_token.first_token(run)
    assert called == ["lmtrain", Path(sys.executable).name]
    assert list(figures["parts_seconds"]) == list(first_token.PARTS)
    assert all(part > 0 for part in figures["parts_seconds"].values())
    assert sum(figures["parts_seconds"].values()) < time.perf_counter() - begun


def test_startup_times_the_help_texts(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("benchmark")
    monkeypatch.setattr(script, "STARTS", 1)
    medians = script.startup()["median_seconds"]
    assert medians["python -c pass"] < medians["lmtrain train --help"]


def test_the_command_of_every_record_still_makes_it(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("benchmark")

    def measured(*_: object) -> dict[str, Any]:
        return {"title": "", "result": "", "seed": None}

    for name in ("train", "beside", "peers", "data", "large_corpus", "attention", "decoding", "first_token"):
        monkeypatch.setattr(script, name, measured)
    monkeypatch.setattr(script, "ALONE", dict.fromkeys(script.ALONE, measured))
    monkeypatch.setattr(script, "example", lambda name, options: ("-".join([name, *options[1::2]]), measured()))
    monkeypatch.setattr(script, "draw_attention", lambda figures, path: None)
    for arguments in BENCHMARKS.values():
        monkeypatch.setattr(sys, "argv", ["scripts/benchmark", *arguments])
        script.main()
    assert {path.stem for path in record.RESULTS.iterdir()} == BENCHMARKS.keys()
    for wrong in (["nothing"], ["decode", "many"], ["attention", "512"], ["large-corpus", "five"]):
        monkeypatch.setattr(sys, "argv", ["scripts/benchmark", *wrong])
        with pytest.raises(SystemExit, match=r"python scripts/benchmark startup|five is no number"):
            script.main()


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (LmtrainError("no such run"), "tune: no such run"),
        (subprocess.CalledProcessError(130, "lmtrain"), 130),
        (subprocess.CalledProcessError(-9, "lmtrain"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_script_ends_as_a_command_does(error: BaseException, end: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/tune"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # those of the tests stay
    with pytest.raises(SystemExit) as ended:
        record.run_script(lambda: fail(error))
    assert ended.value.code == end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_who_ends_a_script_lets_its_command_save(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C goes to the script and to the command that it runs, other signals to the script alone, which passes them
    on; it ends when the command has."""
    command = tmp_path / "python"
    command.write_text(
        f"#!/bin/sh\ncd {tmp_path}\ntrap 'sleep 0.6; touch saved; exit 130' INT TERM USR1\ntouch begun\n"
        "while :; do sleep 0.02; done\n"
    )
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))

    def work(say: Callable[[str], None]) -> None:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            record.run_script(lambda: record.lmtrain("train"))
        except SystemExit as end:
            say(str(end.code))

    child = Child(work)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(child.process, number)
    assert child.hear() == "130"
    assert child.end() == 0
    assert (tmp_path / "saved").exists()
