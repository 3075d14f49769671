"""The measuring scripts, on sizes that take no time: they run, and what they write agrees with what was run.

Other programs' models are doubles with the same interface, whose scores can be told beforehand.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import peers
import pytest
import record
import torch
import training_parts
import training_speed
import tuning
from torch import Tensor, nn
from training_speed import Sizes

from lmtrain.data.tokens import TokenStore
from lmtrain.nn import dot_product, dropout, output_loss
from lmtrain.training import state
from tests.conftest import TINY, Lmtrain

SCRIPTS = Path(__file__).parent.parent / "scripts"
SMALL = Sizes(dim=16, layers=1, heads=2, context=8, vocab=50, batch=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Little text, once each, not compiled, against a made-up peak."""
    for name, value in {"TOKENS": 3000, "WARM_UP": 1, "STEPS": 1, "BLOCKS": 1, "ROUNDS": 1}.items():
        monkeypatch.setattr(training_speed, name, value)
    monkeypatch.setattr(training_speed, "peak_flops", lambda device, precision: 1e12)
    monkeypatch.setattr(state, "compiled_forward", lambda model, *_: model)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """What would be a process of its own runs here; the arguments of each."""
    started: list[list[str]] = []

    def run_alone(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
        started.append(arguments[1:])
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        {"training_speed": training_speed, "training_parts": training_parts}[Path(arguments[0]).stem].main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        return result

    for module in (training_speed, training_parts):
        monkeypatch.setattr(module, "run_alone", run_alone)
    return started


def test_every_lever_is_measured(monkeypatch: pytest.MonkeyPatch, in_this_process: list[list[str]]) -> None:
    monkeypatch.setattr(dot_product, "_attend_plain", dot_product._attend_plain)  # put back what a lever changes
    monkeypatch.setattr(dropout, "hashed_keep", dropout.hashed_keep)
    monkeypatch.setattr(output_loss, "target_nats", output_loss.target_nats)
    monkeypatch.setattr(training_parts, "choose_precision", lambda *_: "bf16")
    figures = training_parts.levers(SMALL)
    assert {arguments[0] for arguments in in_this_process} == {*training_parts.LEVERS, "optimizer"}
    assert figures["tokens_per_second"].keys() == training_parts.LEVERS.keys()
    assert all(rate > 0 for rate in figures["tokens_per_second"].values())
    flops = {name: rounds[0]["flops_per_token"] for name, rounds in figures["rounds"].items()}
    (first, *others) = flops.values()  # no lever changes the model; the bias's gradient is a product or a sum
    assert others == pytest.approx([first] * len(others), rel=0.01)
    assert figures["optimizer_seconds"].keys() == {"clip", "fused", "plain"}


def test_the_head_is_a_part_of_the_step(monkeypatch: pytest.MonkeyPatch, in_this_process: list[list[str]]) -> None:
    monkeypatch.setattr(training_parts, "BASE", SMALL)
    modes = training_parts.head()["modes"]
    assert modes.keys() == {"causal", "windowed"}
    assert all(0 < one["pool_share"] < math.inf for one in modes.values())
    assert len(in_this_process) == 2


def test_curves_grow_one_size_at_a_time(monkeypatch: pytest.MonkeyPatch, in_this_process: list[list[str]]) -> None:
    monkeypatch.setattr(training_speed, "SMALL", SMALL)
    monkeypatch.setattr(training_speed, "CURVES", {"context": (8, 16), "dim": (16, 32), "vocab": (50, 100)})
    figures = training_speed.curves()
    assert [json.loads(sizes)["batch"] for _, sizes in in_this_process] == [2, 1, 2, 2, 2, 2]
    for points in figures["points"].values():
        assert points[1]["flops_per_token"] > points[0]["flops_per_token"]
    assert 1 < figures["exponents"]["dim"]["operations_per_token"] < 2


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


def test_training_is_measured_beside_another_source(
    monkeypatch: pytest.MonkeyPatch, in_this_process: list[list[str]], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        training_speed, "SIDES", {side: {} for side in training_speed.SIDES if not side.startswith("Hugging")}
    )
    (tmp_path / "model.py").write_text(NANOGPT)
    figures = training_speed.beside(tmp_path, SMALL)
    assert [arguments[0] for arguments in in_this_process] == list(training_speed.SIDES)
    ours, theirs = (max(figures["rounds"][side][0]["tokens_per_second"]) for side in ("lmtrain", "nanoGPT"))
    flops = figures["rounds"]["lmtrain"][0]["flops_per_token"]
    assert f"{ours:,.0f} tokens/s at {ours * flops / 1e12:.0%} of the matrix peak" in figures["result"]
    assert f"nanoGPT {theirs:,.0f} ({ours / theirs:.1f} times)" in figures["result"]
    with pytest.raises(SystemExit, match=r"holds no model\.py"):
        training_speed.load_source(tmp_path / "elsewhere")


class Uniform(nn.Module):
    """A double of every other program's model: all words are equally likely, whatever it was trained on."""

    def __init__(self, words: int, *, steps_first: bool = False) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(words))
        self.steps_first = steps_first

    def forward(self, ids: Tensor, *state: Any) -> Any:
        # One output whatever the weights have become: the gradient is there, and is zero.
        even = (0 * self.logits).log_softmax(0).expand(*ids.shape, -1)
        if self.steps_first:  # the LSTM's interface: rows of steps and lanes together, and the state after them
            return even.flatten(0, 1), state[0]
        return (even, even[..., 0].mean()) if state else even

    def init_hidden(self, lanes: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(lanes), torch.zeros(lanes)

    def configure_optimizers(self, *_: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("train", [peers.train_nanogpt, peers.train_lstm, peers.train_transformer])
def test_peers_are_scored_over_every_token(train: Callable[..., peers.Trained], store: TokenStore) -> None:
    words = store.tokenizer.vocab_size
    source = SimpleNamespace(
        GPT=lambda config: Uniform(config["vocab_size"]),
        GPTConfig=dict,
        RNNModel=lambda kind, words, *_: Uniform(words, steps_first=True),
        TransformerModel=lambda words, *_: Uniform(words),
    )
    model, tokens, nats = train(source, store, 0.001)
    assert tokens > 0
    assert isinstance(model, Uniform)
    assert nats == pytest.approx(store.split("valid").tokens * math.log(words))


@pytest.fixture
def command(lmtrain: Lmtrain, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Commands run in this process, those of the scripts too, in a folder of the test's own."""

    def call(*arguments: str) -> dict[str, Any]:
        done = lmtrain(*arguments, "--json")
        assert done.code == 0, done.err
        result: dict[str, Any] = json.loads(done.out.splitlines()[-1])  # after what the script printed
        return result

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(record, "lmtrain", call)
    return call


def test_reproduce_writes_what_eval_says(
    load_script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: Callable[..., dict[str, Any]],
) -> None:
    script = load_script("reproduce")
    monkeypatch.setattr(
        sys, "argv", ["reproduce", "quickstart", *TINY, "run.name=r", "--adapt", "--limit", "60", "--segment", "8"]
    )
    script.main()
    written = json.loads((tmp_path / "results" / "r.json").read_text())
    assert written["valid"]["nats"] == command("eval", "--run", "runs/r")["nats"]
    alone = command("eval", "--run", "runs/r", "--limit", "60")["word_perplexity"]
    assert f"of `configs/quickstart.yaml` with {' '.join(f'`{one}`' for one in TINY)}, " in written["title"]
    assert f"alone of the first 60 tokens {alone:.2f}; cache of" in written["result"]
    assert list(written["adapted"]) == ["alone", "cache", "dynamic", "dynamic and cache"]
    assert (tmp_path / "results" / "r.png").read_bytes().startswith(b"\x89PNG")


def test_reproduce_scores_with_the_settings_that_it_finds(
    load_script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: Callable[..., dict[str, Any]],
) -> None:
    small_grids(monkeypatch)
    monkeypatch.setattr(tuning, "THETAS", (3.0,))
    monkeypatch.setattr(sys, "argv", ["reproduce", "quickstart", *TINY, "run.name=r", "--tune", "60", "--limit", "60"])
    load_script("reproduce").main()
    written = json.loads((tmp_path / "results" / "r.json").read_text())
    ways = written["adapted"]
    assert list(ways) == ["alone", "temperature", "cache", "dynamic", "dynamic and cache"]
    assert written["tuned_on_tokens"] == 60
    assert ways["cache"]["cache_theta"] == 3.0
    assert math.log2(ways["dynamic"]["dynamic_embedding"]).is_integer()
    assert ways["dynamic"]["stride"] in (8, 16)
    assert ways["dynamic and cache"]["nats"] < ways["alone"]["nats"]


def test_reproduce_on_a_bare_gpu_machine_keeps_what_it_found(
    load_script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without matplotlib and without git there is a record, and it says on what device it was measured."""
    script = load_script("reproduce")
    said = {
        "config": {"data": {"source": "words"}, "run": {"name": None, "seed": 1}, "train": {"device": "auto"}},
        **{"parameters": 10, "run": "runs/r", "step": 3, "minutes": 1.0, "context": 4, "stride": 2},
        **{"word_perplexity": 2.0, "bits_per_byte": 1.0},
    }

    def no_git(command: list[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(script, "lmtrain", lambda *_: said)
    monkeypatch.setattr(script, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(subprocess, "run", no_git)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["reproduce", "quickstart"])
    script.main()
    written = json.loads((tmp_path / "quickstart.json").read_text())
    assert written["machine"]["device"] == "H200"
    assert written["commit"] == "unknown"
    assert "matplotlib" in capsys.readouterr().err


@pytest.mark.usefixtures("command")
def test_reproduce_keeps_its_record_where_adapting_fails(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = load_script("reproduce")

    def diverges(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "lmtrain")

    monkeypatch.setattr(script, "adapted", diverges)
    monkeypatch.setattr(sys, "argv", ["reproduce", "quickstart", *TINY, "run.name=r", "--adapt"])
    with pytest.raises(subprocess.CalledProcessError):
        script.main()
    written = json.loads((tmp_path / "results" / "r.json").read_text())
    assert written["valid"]["nats"] > 0
    assert "adapted" not in written


def small_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TEMPERATURES", (1.0, 1.15))
    monkeypatch.setattr(tuning, "SEGMENTS", (8, 16))


def test_tune_finds_what_eval_confirms(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, workdir: Path, lmtrain: Lmtrain
) -> None:
    run = next((workdir / "runs").iterdir())
    script = load_script("tune")
    small_grids(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["tune", str(run), "--tokens", "60"])
    script.main()
    written = json.loads((record.RESULTS / f"tune-{run.name}.json").read_text())
    assert min(written["dynamic"], key=lambda tried: tried["token_perplexity"]) == written["best"]["dynamic"]
    assert len(written["dynamic"]) >= 10  # six moves from the best rates, these, two more decays, another segment
    found = written["best"]
    assert list(found) == ["plain", "temperature", "cache", "dynamic", "dynamic and cache"]
    for mode, best in found.items():
        options = " ".join(best["options"]).split()
        done = lmtrain("eval", "--run", run, "--limit", 60, *options, "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out.splitlines()[-1])["token_perplexity"] == pytest.approx(
            best["token_perplexity"], rel=1e-4
        ), mode


@pytest.mark.parametrize("start", [(2.0**-8, 1.0), (2.0**-4, 2.0**-6), (2.0**9, 4.0), (1.0, 2.0**12)])
def test_the_rates_are_found_wherever_the_search_begins(start: tuple[float, float]) -> None:
    """The best rate is 1/4 for the words' vectors and 2 for the rest, and both diverge beyond 64."""
    asked: list[tuning.Setting] = []

    def loss(setting: tuning.Setting) -> float:
        asked.append(setting)
        rate, words = setting[0], setting[0] * setting[1]
        if max(rate, words) > 64:
            return math.inf
        return math.log2(rate / 2) ** 2 + math.log2(words / 0.25) ** 2

    assert tuning.climb((*start, 0.5, 32), loss) == (2.0, 0.125, 0.5, 32)
    assert len(set(asked)) < 40


class InTurn(Executor):
    """Does at once what it is given: a run can't be stopped by signals, as it wants to be, in a thread of its own."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(call(*arguments, **named))
        return done


@pytest.mark.usefixtures("command")
def test_a_sweep_tries_each_change_and_repeats_none(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = SCRIPTS.parent / "configs" / "quickstart.yaml"
    trials = ["--common", *TINY, "--trial", "--trial", "model.dim=8"]
    script = load_script("sweep")
    monkeypatch.setattr(script, "ThreadPoolExecutor", InTurn)

    def sweep(config: Path) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["sweep", "small", "--config", str(config), *trials])
        script.main()
        result: dict[str, Any] = json.loads((record.RESULTS / "sweep-small.json").read_text())
        return result

    written = sweep(config)
    assert "2 trials of `configs/quickstart.yaml` with" in written["title"]
    first, second = written["trials"]
    assert first["parameters"] > second["parameters"]
    wins = first["word_perplexity"] <= second["word_perplexity"]
    assert written["result"].endswith(" with nothing changed" if wins else " with `model.dim=8`")
    assert first["word_perplexity"] == first["runs"][0]["valid"]["word_perplexity"]
    states = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/sweep-small/*/state.json")}
    elsewhere = tmp_path / "own.yaml"
    elsewhere.write_text(config.read_text())
    assert "2 trials of `own.yaml` with" in sweep(elsewhere)["title"]
    assert len(states) == 2
    assert all(path.stat().st_mtime_ns == changed for path, changed in states.items())


def test_a_sweep_ends_with_the_trial_that_fails(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("sweep")
    begun = []

    def run_trial(_name: str, index: int, *_: object) -> None:
        begun.append(index)
        if index == 0:
            raise KeyboardInterrupt  # as a trial that is interrupted ends
        time.sleep(0.2)

    monkeypatch.setattr(script, "run_trial", run_trial)
    monkeypatch.setattr(sys, "argv", ["sweep", "x", "--config", "c.yaml", "--trial", "--trial", "--trial", "--trial"])
    with pytest.raises(KeyboardInterrupt):
        script.main()
    assert len(begun) < 3  # the second may have begun before the first was seen to fail


def test_the_other_measurements_run(
    load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, data_dir: Path, tmp_path: Path
) -> None:
    script = load_script("benchmark")
    monkeypatch.setattr(script, "REPEATS", 1)
    trained = script.train("quickstart", [*TINY, f"data.dir={data_dir}"])
    assert len(trained["tokens_per_second"]) == 1
    for name, value in {"DIM": 16, "HEADS": 2, "WINDOW": 4, "GLOBAL": 1, "STRIDE": 2, "PROJECTED": 4}.items():
        monkeypatch.setattr(script, name, value)
    layers = script.attention([8, 16, 32])
    assert layers["exponent"].keys() == script.attention_layers(8).keys()
    script.draw_attention(layers, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 10_000
    monkeypatch.setattr(script, "SAVED_PARAMETERS", 3000)
    assert script.checkpoints()["median_seconds"].keys() == {"stall", "written", "torch.save", "torch.save and fsync"}
