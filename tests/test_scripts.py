"""The scripts, on sizes that take no time: each runs once, and its record agrees with what was run.

Commands of lmtrain run in this process. Other programs' models are doubles with the same interface.
"""

import itertools
import json
import math
import os
import subprocess
import sys
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

from tests.helpers import TINY, Lmtrain

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALL = ["model.dim=16", "model.layers=1", "model.heads=2", "train.device=cpu", "train.precision=fp32"]


def program(name: str) -> ModuleType:
    """A script as a module."""
    module, path = ModuleType(name), SCRIPTS / name
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


benchmark, reproduce, soak = program("benchmark"), program("reproduce"), program("soak")
SIDES = {
    "bench_training": bench_training.measure_peer,
    "bench_decoding": bench_decoding.measure_transformers,
    "bench_peers": bench_peers.measure_peer,
}


@pytest.fixture
def command(lmtrain: Lmtrain, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[..., dict[str, Any]]:
    """Commands of lmtrain run in this process, those of the scripts too; nothing compiles.

    Runs and records are in a folder of the test.
    """

    def run_python(arguments: list[str]) -> str:
        if arguments[0] != "-m":
            return "number of parameters: 1\n" + json.dumps(SIDES[Path(arguments[0]).stem](json.loads(arguments[1])))
        argv = sys.argv
        done = lmtrain(*["train.compile=false" if part == "train.compile=true" else part for part in arguments[2:]])
        sys.argv = argv
        if done.code:
            raise subprocess.CalledProcessError(done.code, arguments, done.out, done.err)
        return done.out

    for module in (record, bench_peers):
        monkeypatch.setattr(module, "RESULTS", folder)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(bench_training, "WORDS", 2000)
    for module in (record, bench_decoding):
        monkeypatch.setattr(module, "run_python", run_python)
    return record.lmtrain


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, command: object) -> Callable[..., list[dict[str, Any]]]:
    """Run a script's `main`, with some of its constants replaced; the records of the file that it writes to."""

    def run(script: ModuleType, file: str, *arguments: str, **constants: object) -> list[dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [f"scripts/{script.__name__}", *arguments])
        for constant, value in constants.items():
            monkeypatch.setattr(script, constant, value)
        script.main()
        return record.read_records(record.RESULTS / f"{file}.json")

    return run


class Gpt2(nn.Module):
    """A double of transformers' model: `generate` appends zeros."""

    def generate(self, prompts: Tensor, **options: Any) -> Tensor:
        assert options["max_new_tokens"] == options["min_new_tokens"]
        return F.pad(prompts, (0, options["max_new_tokens"]))


class Bigrams(nn.Module):
    """A double of every other program's model: it learns what word follows each; with a scale of 0 it learns nothing,
    and all words are equally likely."""

    def __init__(self, words: int, *, scale: float = 1.0, steps_first: bool = False) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(words, words))
        self.scale = scale
        self.steps_first = steps_first

    def forward(self, ids: Tensor, state: Any) -> Any:
        log_probs = (self.scale * self.logits[ids]).log_softmax(-1)
        if self.steps_first:  # the LSTM's interface: rows of steps and lanes together, and the state after them
            return log_probs.flatten(0, 1), state
        return log_probs, F.nll_loss(log_probs.flatten(0, 1), state.view(-1))  # nanoGPT's targets must be contiguous

    def init_hidden(self, lanes: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(lanes), torch.zeros(lanes)

    def configure_optimizers(self, *_: object) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def source(scale: float = 1.0) -> SimpleNamespace:
    """A double of the modules of the other programs."""
    return SimpleNamespace(
        GPT=lambda config: Bigrams(config["vocab_size"], scale=scale),
        GPTConfig=dict,
        RNNModel=lambda kind, words, *_: Bigrams(words, scale=scale, steps_first=True),
    )


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ([], [("lmtrain", True)]),
        (["--nanogpt", "n"], [("lmtrain", True), ("nanoGPT", True), ("lmtrain", False), ("nanoGPT", False)]),
        (["--nanogpt", "n", "train.compile=false"], [("lmtrain", False), ("nanoGPT", False)]),
    ],
)
def test_training_is_measured(script: Any, monkeypatch: pytest.MonkeyPatch, peers: list[str], expected: object) -> None:
    monkeypatch.setattr(bench_training, "load_source", lambda folder: source(scale=0.0))
    sizes = ["--vocab-size", "50", "--steps", "4", "model.context=8", "train.batch_size=2", "eval.stride=null"]
    (found,) = script(benchmark, "benchmarks", "train", "wikitext2", *SMALL, *sizes, *peers)
    rows = found["metrics"]["rows"]
    assert [(row["program"], row["compiled"]) for row in rows] == expected
    assert {(row["precision"], row["heap"]) for row in rows} == {("fp32", "retained")}
    assert all(row["tokens_per_second"] > 0 and row["peak_bytes"] > 1e7 for row in rows)
    assert all(0 < row["peak_share"] < 1 for row in rows[::2])
    assert (found["settings"]["recipe"], found["settings"]["config"]["model"]["context"]) == ("wikitext2", 8)
    assert found["metrics"]["tokens_per_step"] == 16


def test_decoding_compares_like_with_like(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    double: Any = ModuleType("transformers")
    double.__spec__ = ModuleSpec("transformers", None)
    double.GPT2Config, double.GPT2LMHeadModel = dict, lambda config: Gpt2()
    double.logging = SimpleNamespace(set_verbosity_error=lambda: None)
    monkeypatch.setitem(sys.modules, "transformers", double)
    monkeypatch.setattr(record, "version", lambda package: "1.0")
    monkeypatch.setattr(bench_decoding, "choose_precision", lambda *_: "bf16")
    monkeypatch.setattr(bench_decoding, "CASES", ((1, 1), (2, 3)))
    monkeypatch.setattr(bench_decoding, "NEW", 3)
    monkeypatch.setattr(bench_decoding, "TURNS", 2)
    (found,) = script(benchmark, "benchmarks", "decode", "wikitext2", *SMALL, "--vocab-size", "50")
    rows = found["metrics"]["rows"]
    cases = [(row["precision"], row["prompts"], row["beams"]) for row in rows]
    assert cases == [(kind, *case) for kind in ("fp32", "bf16") for case in ((1, 1), (2, 3))]
    for row in rows:
        assert row["compiled"] is False
        assert row["ratio"] == row["lmtrain_tokens_per_second"] / row["transformers_tokens_per_second"]
    assert found["versions"]["transformers"] == "1.0"
    assert found["settings"]["vocab_size"] == 50


def test_peers_are_scored_over_every_token(
    script: Any, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("once upon a time there was a river .\n" * 1000)
    monkeypatch.setattr(bench_peers, "load_source", lambda folder: source(scale=0.0))
    monkeypatch.setattr(bench_peers, "cores", lambda: 1)
    clock = itertools.count(step=0.0625)  # of the other programs: seconds at each look, one for each step
    monkeypatch.setattr(bench_peers, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    options = ["--minutes", "0.19", "--nanogpt", "n", "--word-language-model", "w"]
    (found,) = script(benchmark, "peers", "peers", "quickstart", *options, *TINY, f"data.source={tmp_path}/book.txt")
    assert (found["benchmark"], found["settings"]["recipe"]) == ("peers-0.19-minutes", "quickstart")
    ours, *others = found["metrics"]["rows"]
    assert [row["program"] for row in others] == list(bench_peers.PROGRAMS)
    assert {row["precision"] for row in (ours, *others)} == {"fp32"}  # as TINY says, also where bf16 would be faster
    assert (record.RESULTS / "peers-0.19-minutes.png").read_bytes().startswith(b"\x89PNG")
    store = command("tokenize", str(tmp_path / "book.txt"), "tokenizer.kind=word")
    valid, words = store["splits"]["valid"], store["vocab_size"]
    assert ours["word_perplexity"] == math.exp(ours["nats"] / (valid["words"] + valid["lines"]))
    for row in others:
        assert row["tokens"] > 0
        assert row["curve"][-1] == [pytest.approx(181 * 0.0625 / 60), pytest.approx(words)]
        assert (row["parameters"], row["nats"]) == (words**2, pytest.approx(valid["tokens"] * math.log(words)))
        assert row["word_perplexity"] == pytest.approx(words)


@pytest.mark.parametrize("name", bench_peers.PROGRAMS)
def test_a_peer_is_trained_to_predict_the_next_word(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    words = torch.arange(7)
    side = {"dropout": 0.0, "precision": "fp32"}
    peer = bench_peers.PROGRAMS[name](source(), words.repeat(300), len(words), side)
    losses = [float(peer.step(number, number / 20)) for number in range(20)]
    assert losses[-1] < losses[0] == pytest.approx(math.log(7))
    logits = peer.model.get_parameter("logits")
    assert torch.equal(logits.argmax(1), (words + 1) % 7)


def test_the_lstm_scores_a_text_with_the_state_of_what_it_has_read() -> None:
    read = []

    class Counting(Bigrams):
        def forward(self, ids: Tensor, state: Any) -> Any:
            read.append(float(state[0][0]))
            log_probs, state = super().forward(ids, state)
            return log_probs, tuple(part + 1 for part in state)

    source = SimpleNamespace(RNNModel=lambda kind, words, *_: Counting(words, steps_first=True))
    peer = bench_peers.PROGRAMS["word_language_model LSTM"](source, torch.arange(7).repeat(300), 7, {})
    for _ in range(3):
        peer.score(torch.arange(4)[None], torch.arange(4)[None])
    assert read == [0, 1, 2]


def test_startup_is_the_median_of_rounds_of_commands(script: Any) -> None:
    """By a clock that counts the commands, which do not run."""
    clock = itertools.count()
    (found,) = script(benchmark, "benchmarks", "startup", STARTS=3, seconds=lambda run, command: next(clock))
    assert [row["median_seconds"] for row in found["metrics"]["rows"]] == [5, 6, 7, 8, 9]


@pytest.fixture
def text(tmp_path: Path) -> str:
    """A text with a short validation split, as an override."""
    for split, lines in (("train", 100), ("valid", 10)):
        (tmp_path / f"{split}.txt").write_text("once upon a time there was a river .\n" * lines)
    return f"data.source={tmp_path}"


def test_reproduce_adapts(script: Any, command: Any, text: str) -> None:
    (found,) = script(reproduce, "recipes", "quickstart", *TINY, text, "run.name=r", "--adapt")
    rows = {row["method"]: row["nats"] for row in found["metrics"]["rows"]}
    flags = {
        "plain": [],
        "cache": ["--cache"],
        "dynamic": ["--dynamic", "eval.stride=16"],
        "dynamic and cache": ["--dynamic", "--cache", "eval.stride=16"],
    }
    assert rows == {name: command("eval", "--run", "runs/r", *options)["nats"] for name, options in flags.items()}
    assert found["seeds"] == [1]


def test_reproduce_compares_variants(script: Any) -> None:
    variants = ["--variant", "--variant", "model.dim=8", "--seeds", "1", "2", "--name", "widths"]
    (found,) = script(reproduce, "sweeps", "quickstart", *TINY, *variants)
    first, second = found["metrics"]["rows"]
    assert (first["overrides"], second["overrides"], found["seeds"]) == ([], ["model.dim=8"], [1, 2])
    assert first["parameters"] > second["parameters"]
    scores = [run["valid"]["word_perplexity"] for run in first["runs"]]
    assert first["word_perplexity"] == pytest.approx(sum(scores) / 2)
    assert first["spread"] == max(scores) - min(scores) > 0


def test_reproduce_compares_an_ensemble_with_its_members(script: Any, command: Any, text: str) -> None:
    """Whatever gives the budget, the models beside the ensemble take as many steps as all its members."""
    budget = ["train.steps=null", "train.tokens=768", "train.max_minutes=60"]
    options = [text, *budget, "eval.stride=8", "--ensemble", "2", "--name", "two"]
    (found,) = script(reproduce, "ensembles", "quickstart", *TINY, *options, "--adapt")
    rows = found["metrics"]["rows"]
    models = ["seed 1", "seed 2", "mean of 2", "2 times the steps", "the same, learning from the mean of 2"]
    methods = ["cache", "dynamic", "dynamic and cache"]
    assert [row["model"] for row in rows] == [*models, *["mean of 2"] * 3]
    assert [row["method"] for row in rows] == [*["plain"] * 5, *methods]
    assert [row["steps"] for row in rows] == [12, 12, *[24] * 6]
    assert {(row["temperature"], row["tokens"], row["context"], row["stride"]) for row in rows} == {(1.0, 100, 16, 8)}
    runs = ["--run", "runs/two/seed-1", "--run", "runs/two/seed-2", "eval.stride=8"]
    for row, flags in ((rows[2], []), (rows[7], ["--dynamic", "--cache"])):
        assert row["word_perplexity"] == command("eval", *runs, *flags)["word_perplexity"]
    config = (Path("runs/two/distilled") / "config.yaml").read_text()
    assert "runs/two/seed-1" in config
    assert found["seeds"] == [1, 2]
    plain = script(reproduce, "ensembles", "quickstart", *TINY, *options)[-1]
    assert plain["metrics"]["rows"] == rows[:5]  # of the runs that are finished, which are not trained again


def test_a_finished_run_is_scored_with_the_settings_of_the_command(script: Any) -> None:
    for options, stride in (([], 4), (["eval.stride=8"], 8)):
        arguments = [*TINY, "run.name=r", "--adapt", *options]
        found = script(reproduce, "recipes", "quickstart", *arguments, METHODS={"cache": ["--cache"]})
        assert [row["stride"] for row in found[-1]["metrics"]["rows"]] == [stride] * 2  # plain, and with the cache


def test_a_windowed_model_is_adapted_by_the_cache_only() -> None:
    assert reproduce.adaptive({"model": {"mode": "windowed"}}) == {"cache": ["--cache"]}


def test_soak_finds_equal_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "soak"), "--kills", "1", "--steps", "20", "--no-record"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed.splitlines()[-1])
    stages = ("starts", "steps", "evaluations", "saves")
    assert found["kills"] == sum(found[f"kills_during_{stage}"] for stage in stages) == 1
    assert found["equal_runs"] >= 1


def test_a_different_end_fails_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = itertools.count()
    doubles: dict[str, Callable[..., object]] = {
        "part": lambda *_: True,
        "killed_part": lambda *_: "steps",
        "end": lambda _: {"counters": next(ends)},
    }
    for name, double in doubles.items():
        monkeypatch.setattr(soak.Run, name, double)
    monkeypatch.setattr(sys, "argv", ["scripts/soak", "--kills", "1", "--no-record"])
    with pytest.raises(SystemExit, match=r"^1$"):
        soak.main()


def test_a_damaged_checkpoint_fails_the_soak(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-00000003.damaged").mkdir(parents=True)
    with pytest.raises(SystemExit, match=r"step-00000003\.damaged was damaged"):
        soak.Run(tmp_path, 20).end()
