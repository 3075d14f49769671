"""train.init_from: a run starts from the best weights of another one, only once; which runs are rejected for it, or
as a teacher."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lmtrain
from lmtrain.config.schema import Config
from lmtrain.data.tokenizing import prepare_store
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.storage import run_checkpoints
from lmtrain.training import train_state
from lmtrain.training.other_runs import initial_weights, load_teacher
from lmtrain.training.train_state import new_state
from tests.helpers import CPU, Interrupt, Lmtrain, flip_bit
from tests.training.helpers import change, last_hash, run, run_interrupted


@pytest.fixture
def continued(tiny: Config, base: Path) -> Config:
    return change(tiny, train__init_from=str(base), run__seed=2)


@pytest.mark.parametrize(("base_ema", "ema", "weights"), [(0.9, 0.9, "ema"), (0.9, None, "ema"), (None, 0.9, "raw")])
def test_the_initial_weights_are_the_best_ema_ones_if_there_are_any(
    tiny: Config, tmp_path: Path, base_ema: float | None, ema: float | None, weights: str
) -> None:
    run(change(tiny, train__ema=base_ema), tmp_path)
    config = change(tiny, train__ema=ema, train__init_from=str(tmp_path))
    store, expected = prepare_store(config), lmtrain.load(tmp_path, checkpoint="best", weights=weights, device="cpu")
    found = initial_weights(config, store)
    assert found is not None
    state = new_state(config, store, base=found)
    assert found.info["step"] == expected.step
    for name, value in expected.model.named_parameters():
        assert torch.equal(state.model.get_parameter(name), value)
        assert not state.ema or torch.equal(state.ema[name], value)
    assert bool(state.ema) == (ema is not None)


def test_a_run_that_learns_nothing_has_the_score_of_its_base(
    continued: Config, base: Path, tiny: Config, tmp_path: Path
) -> None:
    config = change(continued, train__lr=1e-12, train__steps=1)
    outcome, notes = run(config, tmp_path / "run", quiet=False)
    before = run(tiny, base)[0].valid
    assert outcome.valid.nats == pytest.approx(before.nats, rel=1e-6)
    step = lmtrain.load(base, checkpoint="best", device="cpu").step
    assert f"starting from the weights of {base} at step {step}" in notes


def test_a_resumed_run_does_not_need_its_base(
    continued: Config, store: TokenStore, base: Path, tmp_path: Path, interrupt_after: Interrupt
) -> None:
    shutil.copytree(base, tmp_path / "base")
    config = change(continued, train__init_from=str(tmp_path / "base"))
    run(config, tmp_path / "whole")
    interrupt_after(5)
    run_interrupted(config, tmp_path / "parts")
    shutil.rmtree(tmp_path / "base")
    _, notes = run(config, tmp_path / "parts")
    assert not any("starting" in note for note in notes)
    assert last_hash(tmp_path / "parts") == last_hash(tmp_path / "whole")


@pytest.mark.parametrize(
    "fields",
    [
        {"model__context": 24},
        {"model__dropout": 0.0, "model__attention_dropout": 0.05, "model__input_dropout": 0.05},
        {"model__output_dropout": 0.05},
        {"train__optimizer": "muon"},
    ],
)
def test_fields_that_do_not_affect_the_weights_may_differ(
    continued: Config, store: TokenStore, fields: dict[str, Any]
) -> None:
    config = change(continued, **fields)
    found = initial_weights(config, store)
    assert found is not None
    new_state(config, store, base=found)


@pytest.mark.parametrize(
    ("field", "fields", "message"),
    [
        ("init_from", {"train__init_from": "nowhere"}, "there is no run .*/nowhere: train one with"),
        ("init_from", {"train__init_from": "a" * 5_000}, "there is no run .*/a+: train one with"),
        ("init_from", {"model__heads": 4}, "has model.heads=2, and this run 4: use the same"),
        ("init_from", {"model__mode": "windowed"}, "has model.mode=causal, and this run windowed: use the same"),
        ("teacher", {"train__teacher": "nowhere"}, "there is no run .*/nowhere: train one with"),
        ("teacher", {"model__context": 32}, "reads 16 tokens at most: set model.context=16 or less"),
        ("teacher", {"model__mode": "windowed"}, "has model.mode=causal, and this run windowed"),
    ],
)
def test_an_unsuitable_run_is_rejected(
    tiny: Config,
    store: TokenStore,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    fields: dict[str, Any],
    message: str,
) -> None:
    """Before the model is compiled, which may take minutes."""
    config = change(tiny, **{f"train__{field}": str(base)} | fields)
    monkeypatch.setattr(train_state, "compiled_forward", None)  # it must not be called
    with pytest.raises(LmtrainError, match=message):
        run(config, tmp_path / "run")
    assert not run_checkpoints.folders(tmp_path / "run")


@pytest.mark.parametrize(
    "fields", [{"model__position": "learned"}, {"model__mode": "windowed", "model__attention": "linformer"}]
)
def test_learned_positions_and_linformer_need_the_same_context(
    tiny: Config, store: TokenStore, tmp_path: Path, fields: dict[str, Any]
) -> None:
    learned = change(tiny, **fields, train__steps=1)
    run(learned, tmp_path / "base")
    config = change(learned, model__context=24, train__init_from=str(tmp_path / "base"))
    with pytest.raises(LmtrainError, match=r"has model\.context=16, and this run 24: use the same"):
        initial_weights(config, store)


def test_a_teacher_may_read_more_tokens(tiny: Config, store: TokenStore, base: Path) -> None:
    teacher, _ = load_teacher(change(tiny, train__teacher=str(base), model__context=8), store, CPU)
    assert teacher.config.context == 16


def test_a_damaged_base_is_rejected(continued: Config, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    flip_bit(run_checkpoints.choose(tmp_path / "base", "best") / "ema.safetensors")
    with pytest.raises(LmtrainError, match=r"ema\.safetensors is damaged"):
        run(change(continued, train__init_from=str(tmp_path / "base")), tmp_path / "run")


def test_a_run_on_own_text_starts_from_another_run_with_its_tokenizer(lmtrain: Lmtrain, workdir: Path) -> None:
    base = next((workdir / "runs").iterdir())
    (workdir / "own.txt").write_text("".join(f"The river {number} ran past the town\n" for number in range(200)))
    given = ["train", "-c", str(base / "config.yaml"), "data.source=own.txt", "run.name=own", f"train.init_from={base}"]
    rejected = lmtrain(*given)
    remedy = f"tokenizer.file={base}/tokenizer.json"
    assert rejected.code == 1
    assert rejected.err.splitlines()[-1].endswith(f"has another tokenizer, and so another vocabulary: give {remedy}")
    done = lmtrain(*given, remedy)
    assert done.code == 0, done.err
    assert f"starting from the weights of {base}" in done.err
    assert (workdir / "runs/own/tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    shutil.rmtree(base)
    assert lmtrain("eval", "--run", "runs/own").code == 0
