"""The scripts, on sizes that take no time: each runs once, and its record agrees with what was run.

Commands of lmtrain run in this process. Other programs' models are doubles with the same interface.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import bench_decoding
import bench_peers
import bench_training
import pytest
import record
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from tests.helpers import TINY, Child, Lmtrain

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALL = ["model.dim=16", "model.layers=1", "model.heads=2", "train.device=cpu", "train.precision=fp32"]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def command(lmtrain: Lmtrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Commands of lmtrain run in this process, those of the scripts too, in a folder of the test; nothing compiles."""

    def call(*arguments: str | Path) -> str:
        argv = sys.argv
        done = lmtrain(*["train.compile=false" if part == "train.compile=true" else part for part in arguments])
        sys.argv = argv
        assert done.code == 0, done.err
        return "".join(line for line in done.out.splitlines(keepends=True) if line.startswith("{"))

    def run_python(arguments: list[str], _environment: object = None) -> str:
        if arguments[0] == "-m":
            return call(*arguments[2:])
        side = json.loads(arguments[1])
        measure = {"bench_training": bench_training.measure_peer, "bench_decoding": bench_decoding.measure_transformers}
        return "number of parameters: 1\n" + json.dumps(measure[Path(arguments[0]).stem](side))

    def as_json(*arguments: str | Path) -> dict[str, Any]:
        result: dict[str, Any] = json.loads(call(*arguments, "--json"))
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(bench_training, "WORDS", 2000)
    for module in (record, bench_training, bench_decoding, bench_peers):
        monkeypatch.setattr(module, "lmtrain", as_json)
        monkeypatch.setattr(module, "run_python", run_python)
    return as_json


@pytest.fixture
def script(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, command: object
) -> Callable[..., list[dict[str, Any]]]:
    """Run a script's `main`; the records of the file that it writes to."""

    def run(name: str, file: str, *arguments: str) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [f"scripts/{name}", *arguments])
        load_script(name).main()
        return record.read_records(record.RESULTS / f"{file}.json")

    return run


NANOGPT = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.output = nn.Linear(config.n_embd, config.vocab_size)
    def forward(self, ids, targets):
        logits = self.output(self.embedding(ids))
        return logits, nn.functional.cross_entropy(logits.transpose(1, 2), targets)
"""


def test_training_is_measured_beside_another_source(script: Any, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(NANOGPT)
    sizes = ["--vocab-size", "50", "--steps", "4", "model.context=8", "train.batch_size=2"]
    (found,) = script("benchmark", "benchmarks", "train", *SMALL, *sizes, "--nanogpt", str(tmp_path))
    assert [(row["program"], row["compiled"]) for row in found["metrics"]["rows"]] == [
        ("lmtrain", True),
        ("nanoGPT", True),
        ("lmtrain", False),
        ("nanoGPT", False),
    ]
    assert {(row["precision"], row["heap"]) for row in found["metrics"]["rows"]} == {("fp32", "retained")}
    assert all(row["tokens_per_second"] > 0 and row["peak_bytes"] > 1e7 for row in found["metrics"]["rows"])
    assert found["settings"]["config"]["model"]["context"] == 8
    assert found["metrics"]["tokens_per_step"] == 16
    with pytest.raises(SystemExit, match=r"has no model\.py"):
        bench_training.load_source(str(tmp_path / "elsewhere"))


def test_training_is_measured_as_a_field_varies(script: Any) -> None:
    sizes = ["--vocab-size", "50", "--steps", "4", "train.batch_size=2"]
    (found,) = script("benchmark", "benchmarks", "train", "quickstart", *SMALL, *sizes, "--vary", "model.context=8,16")
    rows = found["metrics"]["rows"]
    assert [row["model.context"] for row in rows] == ["8", "16"]
    assert rows[0]["estimated_bytes"] < rows[1]["estimated_bytes"]
    assert all(0 < row["peak_share"] < 1 for row in rows)


class Gpt2(nn.Module):
    """A double of transformers' model: `generate` appends zeros."""

    def generate(self, prompts: Tensor, **options: Any) -> Tensor:
        assert options["max_new_tokens"] == options["min_new_tokens"]
        return F.pad(prompts, (0, options["max_new_tokens"]))


def test_decoding_compares_like_with_like(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double: Any = ModuleType("transformers")
    double.__spec__ = ModuleSpec("transformers", None)
    double.GPT2Config, double.GPT2LMHeadModel = dict, lambda config: Gpt2()
    double.logging = SimpleNamespace(set_verbosity_error=lambda: None)
    monkeypatch.setitem(sys.modules, "transformers", double)
    monkeypatch.setattr(record, "version", lambda package: "1.0")
    monkeypatch.setattr(bench_decoding, "choose_precision", lambda *_: "bf16")
    monkeypatch.setattr(bench_decoding, "CASES", ((1, 1), (2, 3)))
    (found,) = script("benchmark", "benchmarks", "decode", *SMALL, "--vocab-size", "50", "--new-tokens", "3")
    rows = found["metrics"]["rows"]
    cases = [(row["precision"], row["prompts"], row["beams"]) for row in rows]
    assert cases == [(kind, *case) for kind in ("fp32", "bf16", "int8") for case in ((1, 1), (2, 3))]
    for row in rows:
        assert row["compiled"] is False
        theirs = row["transformers_tokens_per_second"]
        assert row["ratio"] == (row["lmtrain_tokens_per_second"] / theirs if theirs else None)
    assert [row["ratio"] for row in rows[4:]] == [None, None]
    assert found["versions"]["transformers"] == "1.0"
    assert found["settings"]["vocab_size"] == 50


class Uniform(nn.Module):
    """A double of every other program's model: all words are equally likely, whatever it was trained on."""

    def __init__(self, words: int, *, steps_first: bool = False) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(words))
        self.steps_first = steps_first

    def forward(self, ids: Tensor, *state: Any) -> Any:
        even = (0 * self.logits).log_softmax(0).expand(*ids.shape, -1)  # there is a gradient, and it is zero
        if self.steps_first:  # the LSTM's interface: rows of steps and lanes together, and the state after them
            return even.flatten(0, 1), state[0]
        return (even, even[..., 0].mean()) if state else even

    def init_hidden(self, lanes: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(lanes), torch.zeros(lanes)

    def configure_optimizers(self, *_: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("program", bench_peers.PROGRAMS)
def test_peers_are_scored_over_every_token(
    program: str, store: TokenStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = store.tokenizer.vocab_size
    source = SimpleNamespace(
        GPT=lambda config: Uniform(config["vocab_size"]),
        GPTConfig=dict,
        RNNModel=lambda kind, words, *_: Uniform(words, steps_first=True),
    )
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(bench_peers, "load_source", lambda folder: source)
    side = {"program": program, "source": "", "store": str(store.folder), "minutes": 0.001, "threads": 1}
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", json.dumps({**side, "precision": "fp32"})])
    bench_peers.main()
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] > 0
    assert found["parameters"] == words
    assert found["nats"] == pytest.approx(store.split("valid").tokens * math.log(words))


def test_sliding_windows_score_each_token_with_its_context() -> None:
    """A model whose nats for a token depend on how many tokens it has before it, 0 to 7."""

    def logits(inputs: Tensor) -> Tensor:
        ages = torch.arange(inputs.shape[1]).float()
        return torch.stack([torch.zeros(len(ages)), ages], -1).expand(len(inputs), -1, -1)

    stream = torch.zeros(22, dtype=torch.long)
    ages = [*range(8), *[6, 7] * 6, 7]  # the first window whole, then the last quarter of each; one token is left
    nats = [math.log(1 + math.exp(age)) for age in ages]
    assert bench_peers.sliding_nats(logits, stream, 8) == pytest.approx(sum(nats))


def test_peers_are_recorded_with_their_perplexity(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, Any] = {
        **{"folder": "f", "splits": {"valid": {"words": 10}}, "run": "runs/r", "step": 3, "nats": 20.0},
        **{
            "parameters": 5,
            "config": {"model": {"mode": "causal", "context": 4}, "train": {"batch_size": 2, "compile": True}},
        },
    }
    said["config"]["train"] = {"batch_size": 2, "compile": True}
    printed = json.dumps({"nats": 30.0, "tokens": 7, "parameters": 6})
    monkeypatch.setattr(bench_peers, "lmtrain", lambda *_: said)
    monkeypatch.setattr(bench_peers, "run_python", lambda *_: printed)
    (found,) = script("benchmark", "peers", "peers", "--minutes", "2", "--nanogpt", "somewhere")
    assert found["benchmark"] == "peers-2-minutes"
    ours, theirs = found["metrics"]["rows"]
    assert (ours["word_perplexity"], ours["tokens"]) == (math.exp(2), 24)
    assert (theirs["program"], theirs["word_perplexity"]) == ("nanoGPT", math.exp(3))


def test_startup_times_commands(load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_script("benchmark")
    monkeypatch.setattr(benchmark, "STARTS", 1)
    medians = {row["command"]: row["median_seconds"] for row in benchmark.startup(None)["rows"]}
    assert medians["python -c pass"] < medians["lmtrain train --help"]


def test_reproduce_scores_with_the_settings_that_it_finds(
    script: Any, command: Any, load_script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids = {"TEMPERATURES": (1.0, 1.15), "SEGMENTS": (8, 16), "CACHES": ((3.0, 500), (3.0, 10))}
    reproduce = load_script("reproduce")
    for name, grid in grids.items():
        monkeypatch.setattr(reproduce, name, grid)
    best: dict[str, tuple[float, list[str]]] = {}
    search = reproduce.Search.methods
    monkeypatch.setattr(reproduce.Search, "methods", lambda self: best.update(search(self)) or best)
    monkeypatch.setattr(sys, "argv", ["reproduce", "quickstart", *TINY, "run.name=r", "--tune", "60", "--limit", "60"])
    reproduce.main()
    (found,) = record.read_records(record.RESULTS / "recipes.json")
    first, *rows = found["metrics"]["rows"]
    assert first["nats"] == command("eval", "--run", "runs/r")["nats"]
    assert [row["method"] for row in rows] == ["plain", "temperature", "cache", "dynamic", "dynamic and cache"]
    for row in rows[1:]:
        assert math.log(row["token_perplexity"]) == pytest.approx(best[row["method"]][0], rel=1e-5)
    assert rows[-1]["nats"] < rows[0]["nats"]
    assert (found["settings"]["tuned_on_tokens"], found["seeds"]) == (60, [1])
    assert (record.RESULTS / "r.png").read_bytes().startswith(b"\x89PNG")


def test_reproduce_keeps_its_record_where_adapting_fails(load_script: Any, command: Any, monkeypatch: Any) -> None:
    reproduce = load_script("reproduce")

    def diverges(*arguments: str) -> dict[str, Any]:
        if "--dynamic" in arguments:
            raise subprocess.CalledProcessError(1, "lmtrain")
        result: dict[str, Any] = command(*arguments)
        return result

    monkeypatch.setattr(reproduce, "lmtrain", diverges)
    monkeypatch.setattr(sys, "argv", ["reproduce", "quickstart", *TINY, "run.name=r", "--adapt", "--segment", "8"])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # no curve without matplotlib
    with pytest.raises(subprocess.CalledProcessError):
        reproduce.main()
    (found,) = record.read_records(record.RESULTS / "recipes.json")
    assert [row["method"] for row in found["metrics"]["rows"]] == ["plain"]
    assert not list(record.RESULTS.glob("*.png"))


def test_reproduce_compares_variants(script: Any) -> None:
    variants = ["--variant", "--variant", "model.dim=8", "--seeds", "1", "2", "--name", "widths"]
    (found,) = script("reproduce", "sweeps", "quickstart", *TINY, *variants)
    first, second = found["metrics"]["rows"]
    assert (first["overrides"], second["overrides"], found["seeds"]) == ([], ["model.dim=8"], [1, 2])
    assert first["parameters"] > second["parameters"]
    scores = [run["valid"]["word_perplexity"] for run in first["runs"]]
    assert first["word_perplexity"] == pytest.approx(sum(scores) / 2)
    assert first["spread"] == max(scores) - min(scores) > 0


@pytest.mark.parametrize("start", [(2.0**-8, 1.0), (2.0**-4, 2.0**-6), (2.0**9, 4.0), (1.0, 2.0**12)])
def test_the_rates_are_found_wherever_the_search_starts(load_script: Any, start: tuple[float, float]) -> None:
    """The best rate is 1/4 for the word embeddings and 2 for the rest, and both diverge beyond 64."""

    def loss(rate: float, embedding: float) -> float:
        if max(rate, rate * embedding) > 64:
            return math.inf
        return math.log2(rate / 2) ** 2 + math.log2(rate * embedding / 0.25) ** 2

    assert load_script("reproduce").climb(start, loss) == (2.0, 0.125)


def test_soak_finds_equal_ends() -> None:
    command = [sys.executable, str(SCRIPTS / "soak"), "--kills", "1", "--steps", "20", "--no-record"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    stages = ("starts", "steps", "evaluations", "saves")
    assert found["kills"] == sum(found[f"kills_during_{stage}"] for stage in stages) == 1
    assert found["equal_runs"] == found["runs"]


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (LmtrainError("no such run"), "reproduce: no such run"),
        (subprocess.CalledProcessError(130, "lmtrain"), 130),
        (subprocess.CalledProcessError(-9, "lmtrain"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_script_ends_as_a_command_does(error: BaseException, status: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/reproduce"])
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # those of the tests stay
    with pytest.raises(SystemExit) as ended:
        record.run_script(lambda: fail(error))
    assert ended.value.code == status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_interrupted_lets_its_command_save(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ctrl-C reaches the script and its command, other signals the script only; it ends after the command."""
    command = tmp_path / "python"
    command.write_text(
        f"#!/bin/sh\ncd {tmp_path}\ntrap 'sleep 0.6; touch saved; exit 130' INT TERM USR1\n"
        "sleep 0.3\ntouch started\nwhile :; do sleep 0.02; done\n"  # by then the script waits for it
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
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    (os.killpg if number == signal.SIGINT else os.kill)(child.process, number)
    assert child.hear() == "130"
    assert child.end() == 0
    assert (tmp_path / "saved").exists()
