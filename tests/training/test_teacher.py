"""Distillation: the loss against its definition, the teacher is not trained, and resume needs the same teacher."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.build import build_model
from lmtrain.model.distillation import Distillation
from lmtrain.model.ensemble import Ensemble
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage import checkpoint, run_checkpoints
from lmtrain.training.loop import train_step
from lmtrain.training.other_runs import load_teacher
from tests.helpers import CPU, Interrupt
from tests.training.helpers import change, last_hash, metrics, run, run_interrupted, start, without_dropout

WORDS = 40


def build(config: Config, seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    return build_model(config.model, WORDS)


@pytest.mark.parametrize("fields", [{"model__copy": True}, {"model__mode": "windowed"}, {"model__output": "adaptive"}])
def test_the_loss_is_the_weighted_sum_of_the_texts_and_the_teachers(tiny: Config, fields: dict[str, Any]) -> None:
    config = change(tiny, **fields)
    model, other = build(config, 0).eval(), build(config, 1)
    for parameter in other.parameters():
        parameter.data.mul_(2.0)  # sharper predictions
    tokens, targets = torch.randint(WORDS, (2, 16)), torch.randint(WORDS, (2, config.model.targets))
    loss = Distillation(model, other, 0.3)(tokens, targets)
    p, q = model.predict(tokens).double().exp(), other.eval().predict(tokens).double().exp()
    expected = torch.empty(targets.shape, dtype=torch.float64)
    for place in torch.ones(targets.shape).nonzero().tolist():
        mine, theirs = p[tuple(place)], q[tuple(place)]
        divergence = sum(theirs[word] * (theirs[word] / mine[word]).log() for word in range(WORDS))
        expected[tuple(place)] = -0.7 * mine[targets[tuple(place)]].log() + 0.3 * divergence
    assert torch.allclose(loss.double(), expected, atol=1e-5)
    itself = Distillation(model, model, 1.0)
    assert torch.allclose(itself(tokens, targets), torch.zeros(targets.shape), atol=1e-6)


def test_the_teacher_is_not_trained_and_has_no_dropout(tiny: Config) -> None:
    model, other = build(tiny, 0), Ensemble([build(tiny, 1), build(tiny, 2)])
    before = {name: value.clone() for name, value in other.named_parameters()}
    both = Distillation(model.train(), other.train(), 0.5)
    tokens = torch.randint(WORDS, (2, 16))
    assert torch.equal(both.teacher.predict(tokens), both.teacher.predict(tokens))
    both(tokens, tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in other.parameters())
    assert all(torch.equal(before[name], value) for name, value in other.named_parameters())


def test_the_loss_does_not_depend_on_later_tokens_and_compiles_into_one_graph(tiny: Config) -> None:
    config = change(tiny, model__copy=True)
    teacher = Ensemble([build(config, seed) for seed in (1, 2)])
    both = Distillation(build(config, 0).eval(), teacher, 0.5)
    tokens, targets = torch.randint(WORDS, (1, 16)), torch.randint(WORDS, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % WORDS
    one, other = both(tokens, targets), both(changed, targets)
    assert torch.equal(one[:, :9], other[:, :9])
    assert not torch.equal(one[:, 9:], other[:, 9:])
    torch.compiler.reset()
    compiled = torch.compile(both, dynamic=False, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(tokens, targets), one, atol=1e-6)


def test_a_student_comes_closer_to_its_teacher_than_a_model_trained_on_the_text(
    tiny: Config, store: TokenStore, base: Path
) -> None:
    learner = change(without_dropout(tiny), train__teacher=str(base), train__teacher_weight=1.0, run__seed=2)
    tokens = torch.from_numpy(store.split("valid").ids[:320].astype("int64")).view(20, 16)

    def divergence(config: Config) -> float:
        """From the same teacher, after some steps."""
        state = start(config)
        for _ in range(30):
            train_step(state, 1e-2)
        loss = Distillation(state.model, load_teacher(learner, store, CPU)[0], 1.0)
        return float(loss(tokens, tokens).mean().detach())

    assert divergence(learner) < 0.3 * divergence(change(learner, train__teacher=None))


def test_a_run_resumes_with_its_own_teacher_wherever_it_is_and_with_no_other(
    tiny: Config, base: Path, tmp_path: Path, interrupt_after: Interrupt
) -> None:
    config = change(tiny, train__teacher=str(tmp_path / "teacher"))
    shutil.copytree(base, tmp_path / "teacher")
    run(config, tmp_path / "whole")
    steps = [row for row in metrics(tmp_path / "whole") if row["kind"] == "train"]
    assert {"loss" in row: "perplexity" in row for row in steps} == {True: False}, "the mixed loss has none"
    interrupt_after(5)
    run_interrupted(config, tmp_path / "student")
    other_teacher = r"was trained with another teacher, or an earlier checkpoint of it: choose"
    with pytest.raises(LmtrainError, match=other_teacher):
        run(change(tiny, train__teacher=None), tmp_path / "student")
    shutil.rmtree(tmp_path / "teacher")
    run(change(tiny, run__seed=7), tmp_path / "teacher")
    with pytest.raises(LmtrainError, match=other_teacher):
        run(config, tmp_path / "student")
    outcome, _ = run(change(config, train__teacher=str(base)), tmp_path / "student")
    assert last_hash(tmp_path / "student") == last_hash(tmp_path / "whole")
    with pytest.raises(LmtrainError, match=other_teacher):  # also of a finished run
        run(config, tmp_path / "student")
    shutil.copytree(base, tmp_path / "moved")
    assert run(change(config, train__teacher=str(tmp_path / "moved")), tmp_path / "student")[0].valid == outcome.valid
    run(change(tiny, train__steps=1), tmp_path / "plain")
    with pytest.raises(LmtrainError, match=r"was trained with no teacher: choose another run\.name"):
        run(change(config, train__steps=1), tmp_path / "plain")


def test_several_runs_teach_as_an_ensemble_with_a_hash_of_all(
    tiny: Config, store: TokenStore, base: Path, tmp_path: Path
) -> None:
    run(change(tiny, model__layers=2, run__seed=2), tmp_path / "second")
    folders = [str(base), str(tmp_path / "second")]
    config = change(tiny, train__teacher=folders, train__steps=1)
    alone = [load_teacher(change(config, train__teacher=folder), store, CPU) for folder in folders]
    found, teacher_hash = load_teacher(config, store, CPU)
    assert isinstance(found, Ensemble)
    files = checkpoint.load(run_checkpoints.choose(base, "best")).info["files"]
    assert alone[0][1] == hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    assert len({teacher_hash, *(own for _, own in alone)}) == 3
    tokens = torch.from_numpy(store.split("valid").ids[:32].astype("int64")).view(2, 16)
    probabilities = [own.eval().predict(tokens).exp() for own, _ in alone]
    torch.testing.assert_close(found.eval().predict(tokens).exp(), sum(probabilities) / 2)
    run(config, tmp_path / "student")
    learned = checkpoint.load(run_checkpoints.choose(tmp_path / "student", "last"))
    assert learned.info["teacher"] == teacher_hash
