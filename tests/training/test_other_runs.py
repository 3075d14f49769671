"""Beginning with the weights of a trained run: these very weights, of the same model and words, and once only."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training import loop, state
from lmtrain.training.loop import StepResult, train_step
from lmtrain.training.other_runs import check_other_runs, load_initial_weights
from tests.conftest import Lmtrain
from tests.training.ranks import said, together
from tests.training.test_loop import change, last_hash, run
from tests.training.test_parallel import SHORT, assert_close_curves, assert_close_state, train

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tiny: Config, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to begin with the weights of."""
    folder = tmp_path_factory.mktemp("base") / "run"
    run(tiny, store, folder)
    return folder


@pytest.fixture
def begun(tiny: Config, base: Path) -> Config:
    return change(tiny, train__init_from=str(base), run__seed=2)


def test_all_processes_take_the_same_checkpoint_of_another_run(
    tiny: Config, store: TokenStore, base: Path, tmp_path: Path
) -> None:
    """Also where it is being trained, and a process sees another best than the leader does."""
    older = checkpoint.folders(base)[0]
    assert older != checkpoint.best_folder(base)
    config = change(tiny, train__init_from=str(base), train__teacher=str(base), train__steps=1)

    def work(processes: ProcessGroup) -> None:
        def watched(training: state.Training, lr: float, sampling: float) -> StepResult:
            weights = training.model.embedding.weight.detach()
            (tmp_path / f"{processes.rank}.json").write_text(json.dumps([training.teacher, float(weights.sum())]))
            return train_step(training, lr, sampling)

        def best(run_dir: Path) -> Path | None:
            return older if run_dir == base and not processes.is_main else best_folder(run_dir)

        best_folder = checkpoint.best_folder
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "train_step", watched)
            patch.setattr(checkpoint, "best_folder", best)
            loop.fit(config, store, tmp_path / "run", resume=True, note=print, quiet=True, processes=processes)

    assert together(2, work, tmp_path / "log") == [0, 0], [said(tmp_path / "log", rank) for rank in range(2)]
    ours, theirs = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert ours == theirs


@pytest.mark.parametrize("ema", [0.9, None])
def test_it_begins_with_the_best_averaged_weights(
    begun: Config, store: TokenStore, base: Path, ema: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = change(begun, train__ema=ema, model__dropout=0.0)
    expected = dict(load_trained(base, "best", "ema", DEVICE).model.named_parameters())
    honest = loop.train_step
    first: list[dict[str, torch.Tensor]] = []

    def watched(training: state.Training, lr: float, sampling: float) -> object:
        if not first:
            first.append({name: value.detach().clone() for name, value in training.model.named_parameters()})
            first.append({name: value.clone() for name, value in (training.ema or {}).items()})
        return honest(training, lr, sampling)

    monkeypatch.setattr(loop, "train_step", watched)
    _, notes = run(config, store, tmp_path / "run")
    weights, average = first
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], value) for name, value in expected.items())
    assert average.keys() == (expected.keys() if ema else set())
    assert all(torch.equal(value, weights[name]) for name, value in average.items())
    best = load_trained(base, "best", "ema", DEVICE).step
    assert f"beginning with the weights of {base} at step {best}" in notes


def test_raw_weights_are_taken_where_no_others_were_kept(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    run(change(tiny, train__ema=None), store, tmp_path / "base")
    training = state.prepare(tiny, store, print)
    step = load_initial_weights(tmp_path / "base", tiny, store, training.model, training.ema)
    expected = load_trained(tmp_path / "base", "best", "raw", DEVICE)
    assert step == expected.step
    for name, value in expected.model.named_parameters():
        assert torch.equal(dict(training.model.named_parameters())[name], value)


def test_who_begins_so_is_ahead(begun: Config, tiny: Config, store: TokenStore, base: Path, tmp_path: Path) -> None:
    """A run that learns nothing has the score of the run that it began with, and not that of random weights."""
    still: dict[str, Any] = {"train__lr": 1e-12, "train__steps": 1}
    kept = run(change(begun, **still), store, tmp_path / "kept")[0].score
    random = run(change(tiny, **still), store, tmp_path / "random")[0].score
    before = run(tiny, store, base)[0].score
    assert kept is not None
    assert random is not None
    assert before is not None
    assert kept.nats == pytest.approx(before.nats, rel=1e-6)
    assert random.nats > 1.002 * before.nats  # after a dozen steps


def test_a_resumed_run_needs_the_other_one_no_more(
    begun: Config, store: TokenStore, base: Path, tmp_path: Path, interrupt_after: Callable[[int, int], None]
) -> None:
    shutil.copytree(base, tmp_path / "base")
    config = change(begun, train__init_from=str(tmp_path / "base"))
    run(config, store, tmp_path / "whole")
    interrupt_after(5, signal.SIGTERM)
    assert run(config, store, tmp_path / "parts")[0].status == "interrupted"
    shutil.rmtree(tmp_path / "base")
    _, notes = run(config, store, tmp_path / "parts")
    assert not any("beginning" in note for note in notes)
    assert last_hash(tmp_path / "parts") == last_hash(tmp_path / "whole")
    with pytest.raises(LmtrainError, match=r"train\.init_from: .* -> None"):
        run(change(config, train__init_from=None), store, tmp_path / "parts")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_processes_begin_as_one_does(begun: Config, store: TokenStore, tmp_path: Path, kind: str) -> None:
    config = change(begun, **SHORT)
    train(config, store, tmp_path / "alone", 0)
    train(config, store, tmp_path / kind, 2, kind)
    assert_close_curves(tmp_path / "alone", tmp_path / kind)
    assert_close_state(tmp_path / "alone", tmp_path / kind)


@pytest.mark.parametrize(
    "fields",
    [{"model__context": 24}, {"model__dropout": 0.0, "model__embedding_dropout": 0.3}, {"train__optimizer": "muon"}],
)
def test_what_the_weights_have_no_part_in_may_differ(
    begun: Config, store: TokenStore, base: Path, fields: dict[str, Any]
) -> None:
    config = change(begun, **fields)
    training = state.prepare(config, store, print)
    assert load_initial_weights(base, config, store, training.model, training.ema) > 0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train__init_from": "nowhere"}, "train.init_from=nowhere is not a run folder: it has no config.yaml"),
        ({"model__heads": 4}, "has model.heads=2, and this run 4: use the same"),
        ({"model__dim": 32}, "has model.dim=16, and this run 32: use the same"),
        ({"model__mode": "windowed"}, "has model.mode=causal, and this run windowed: use the same"),
        ({"model__activation": "relu"}, "has model.activation=gelu, and this run relu: use the same"),
    ],
)
def test_another_model_is_refused(
    begun: Config, store: TokenStore, tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(LmtrainError, match=sentence):
        run(change(begun, **fields), store, tmp_path / "run")
    assert not checkpoint.folders(tmp_path / "run")
    with pytest.raises(LmtrainError, match=sentence):
        check_other_runs(change(begun, **fields), store)


def test_learned_positions_are_of_one_context(tiny: Config, store: TokenStore, tmp_path: Path) -> None:
    learned = change(tiny, model__position="learned", train__steps=1)
    run(learned, store, tmp_path / "base")
    config = change(learned, model__context=24, train__init_from=str(tmp_path / "base"))
    with pytest.raises(LmtrainError, match=r"has model\.context=16, and this run 24: use the same"):
        run(config, store, tmp_path / "run")


def test_a_damaged_run_is_refused(begun: Config, store: TokenStore, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    weights = checkpoint.choose(tmp_path / "base", "best") / "ema.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(LmtrainError, match=r"ema\.safetensors is damaged"):
        run(change(begun, train__init_from=str(tmp_path / "base")), store, tmp_path / "run")


def test_the_commands_chain_on_a_text_of_ones_own(lmtrain: Lmtrain, workdir: Path) -> None:
    base = next((workdir / "runs").iterdir())
    lines = [f"The river {number} ran past the town" for number in range(200)]
    (workdir / "own.txt").write_text("".join(f"{line}\n" for line in lines))
    given = ["train", "-c", str(base / "config.yaml"), "data.source=own.txt", "run.name=own", f"train.init_from={base}"]
    refused = lmtrain(*given, "--dry-run")
    remedy = f"tokenizer.file={base}/tokenizer.json"
    assert refused.code == 1
    assert refused.err.splitlines()[-1].endswith(f"has another tokenizer, and so other words than this: give {remedy}")
    done = lmtrain(*given, remedy)
    assert done.code == 0, done.err
    assert f"beginning with the weights of {base}" in done.err
    assert "of the training tokens are <unk>" in done.err
    assert (workdir / "runs/own/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    shutil.rmtree(base)
    scored = lmtrain("eval", "--run", "runs/own")
    assert scored.code == 0, scored.err
    assert lmtrain("generate", "The river", "--run", "runs/own", "-n", "3").code == 0
    resumed = lmtrain(*given[:1], "-c", "runs/own/config.yaml", "tokenizer.file=runs/own/tokenizer.json")
    assert resumed.code == 0, resumed.err
