"""Learning from a trained run: the loss is what it says, the teacher stays as it is, and resume knows which it was."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.errors import LmtrainError
from lmtrain.model.language_model import LanguageModel
from lmtrain.storage import checkpoint
from lmtrain.system.process_group import ProcessGroup
from lmtrain.training import loop, state
from lmtrain.training.other_runs import check_other_runs, load_teacher
from lmtrain.training.parallel import choose_kind
from lmtrain.training.profiling import profile_steps
from lmtrain.training.teacher import Taught
from tests.conftest import Lmtrain
from tests.training.test_loop import change, last_hash, run

pytestmark = pytest.mark.usefixtures("one_thread")
DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def teacher(tiny: Config, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run to learn from."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    run(tiny, store, folder)
    return folder


@pytest.fixture
def taught(tiny: Config, teacher: Path) -> Config:
    return change(tiny, train__teacher=str(teacher), run__seed=2)


def build(config: Config, words: int, seed: int) -> LanguageModel:
    torch.manual_seed(seed)
    return LanguageModel(config.model, words)


@pytest.mark.parametrize("fields", [{"model__copy": True}, {"model__mode": "windowed"}, {"model__output": "adaptive"}])
def test_the_loss_is_the_texts_share_and_the_teachers(tiny: Config, fields: dict[str, Any]) -> None:
    config = change(tiny, **fields)
    model, other = build(config, 40, 0).eval(), build(config, 40, 1)
    for parameter in other.parameters():
        parameter.data.mul_(2.0)  # a teacher that knows something
    windowed = config.model.mode == "windowed"
    tokens, targets = torch.randint(40, (2, 16)), torch.randint(40, (2,) if windowed else (2, 16))
    loss = Taught(model, other, 0.3)(tokens, targets)
    p, q = model.predict(tokens).double().exp(), other.eval().predict(tokens).double().exp()
    expected = torch.empty(targets.shape, dtype=torch.float64)
    for place in torch.ones(targets.shape).nonzero().tolist():
        mine, theirs = p[tuple(place)], q[tuple(place)]
        divergence = sum(theirs[word] * (theirs[word] / mine[word]).log() for word in range(40))
        expected[tuple(place)] = -0.7 * mine[targets[tuple(place)]].log() + 0.3 * divergence
    assert torch.allclose(loss.double(), expected, atol=1e-5)
    assert torch.allclose(Taught(model, model, 1.0)(tokens, targets), torch.zeros(targets.shape), atol=1e-6)


def test_the_teacher_learns_nothing_and_drops_nothing(tiny: Config) -> None:
    model, other = build(tiny, 40, 0), build(tiny, 40, 1)
    before = {name: value.clone() for name, value in other.named_parameters()}
    both = Taught(model.train(), other.train(), 0.5)
    tokens = torch.randint(40, (2, 16))
    assert not other.training
    assert torch.equal(both.teacher.predict(tokens), both.teacher.predict(tokens))
    both(tokens, tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in other.parameters())
    assert all(torch.equal(before[name], value) for name, value in other.named_parameters())


def test_no_later_token_is_seen(tiny: Config) -> None:
    config = change(tiny, model__copy=True)
    both = Taught(build(config, 40, 0).eval(), build(config, 40, 1), 0.5)
    tokens, targets = torch.randint(40, (1, 16)), torch.randint(40, (1, 16))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 40
    one, other = both(tokens, targets), both(changed, targets)
    assert torch.equal(one[:, :9], other[:, :9])
    assert not torch.equal(one[:, 9:], other[:, 9:])


def test_it_compiles_into_one_graph(tiny: Config) -> None:
    both = Taught(build(tiny, 40, 0).eval(), build(tiny, 40, 1), 0.5)
    tokens = torch.randint(40, (2, 16))
    torch.compiler.reset()
    compiled = torch.compile(both, dynamic=False, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(tokens, tokens), both(tokens, tokens), atol=1e-6)


def test_who_learns_from_the_teacher_comes_nearer_to_it_than_who_reads_the_text(
    taught: Config, store: TokenStore, teacher: Path
) -> None:
    dropouts = {f"model__{place}dropout": 0.0 for place in ("", "attention_", "embedding_", "input_", "output_")}
    config = change(taught, train__teacher_weight=1.0, **dropouts)
    tokens = torch.from_numpy(store.split("valid").ids[:320].astype("int64")).view(20, 16)

    def divergence(config: Config) -> float:
        """From the same teacher, after some steps."""
        training = state.prepare(config, store, print)
        asked = Taught(training.model, load_teacher(teacher, taught, store, DEVICE)[0], 1.0)
        for _ in range(30):
            loop.train_step(training, 1e-2)
        return float(asked(tokens, tokens).mean().detach())

    assert divergence(config) < 0.2 * divergence(change(config, train__teacher=None))


def test_a_resumed_student_has_the_same_bits(
    taught: Config, store: TokenStore, tmp_path: Path, interrupt_after: Callable[[int, int], None]
) -> None:
    run(taught, store, tmp_path / "whole")
    interrupt_after(5, 15)
    assert run(taught, store, tmp_path / "parts")[0].status == "interrupted"
    run(taught, store, tmp_path / "parts")
    assert last_hash(tmp_path / "parts") == last_hash(tmp_path / "whole")
    plain = change(taught, train__teacher=None)
    run(plain, store, tmp_path / "plain")
    assert last_hash(tmp_path / "plain") != last_hash(tmp_path / "whole")


def test_a_run_goes_on_with_its_own_teacher_wherever_it_lies_and_with_no_other(
    tiny: Config,
    store: TokenStore,
    teacher: Path,
    tmp_path: Path,
    interrupt_after: Callable[[int, int], None],
) -> None:
    config = change(tiny, train__teacher=str(tmp_path / "teacher"))
    shutil.copytree(teacher, tmp_path / "teacher")
    interrupt_after(5, 15)
    run(config, store, tmp_path / "student")
    with pytest.raises(LmtrainError, match=r"has learned from another teacher, or an earlier checkpoint of it: choose"):
        run(change(tiny, train__teacher=None), store, tmp_path / "student")
    shutil.rmtree(tmp_path / "teacher")
    run(change(tiny, run__seed=7), store, tmp_path / "teacher")
    with pytest.raises(LmtrainError, match=r"has learned from another teacher, or an earlier checkpoint of it: choose"):
        run(config, store, tmp_path / "student")
    run(change(config, train__teacher=str(teacher)), store, tmp_path / "student")
    run(change(tiny, train__steps=1), store, tmp_path / "alone")
    with pytest.raises(LmtrainError, match=r"has learned from no teacher: choose another run\.name"):
        run(change(config, train__steps=1), store, tmp_path / "alone")


def test_a_profile_says_that_a_student_is_not_compiled(taught: Config, store: TokenStore, tmp_path: Path) -> None:
    assert not profile_steps(taught, store, tmp_path, lambda message: None)["compiled"]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train__teacher": "nowhere"}, "train.teacher=nowhere is not a run folder"),
        ({"model__context": 32}, "reads 16 tokens at most: use no longer a model.context"),
        ({"model__mode": "windowed"}, "has model.mode=causal, and this run windowed"),
    ],
)
def test_who_can_not_teach_is_refused(taught: Config, store: TokenStore, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LmtrainError, match=sentence):
        state.prepare(change(taught, **fields), store, print)
    with pytest.raises(LmtrainError, match=sentence):
        check_other_runs(change(taught, **fields), store)


def test_a_teacher_of_other_words_is_refused(lmtrain: Lmtrain, workdir: Path) -> None:
    run_dir = next((workdir / "runs").iterdir())
    found = lmtrain(
        "train", "data.sample_tokens=3000", "tokenizer.kind=byte", f"train.teacher={run_dir}", "run.name=student"
    )
    assert found.code == 1
    assert "has another tokenizer" in found.err.splitlines()[-1]


def test_a_sharded_student_and_a_changed_softmax_are_refused(taught: Config) -> None:
    model = build(taught, 40, 0)
    with pytest.raises(LmtrainError, match=r"train\.teacher=.* can't be sharded"):
        choose_kind(change(taught, train__parallel="fsdp"), model, DEVICE, "fp32", ProcessGroup())
    with pytest.raises(LmtrainError, match=r"set train\.adversarial_softmax=0"):
        change(taught, train__adversarial_softmax=0.01)


def test_the_commands_chain(lmtrain: Lmtrain, workdir: Path) -> None:
    run_dir = next((workdir / "runs").iterdir())
    config = (run_dir / "config.yaml").read_text()
    (workdir / "student.yaml").write_text(config)
    done = lmtrain("train", "-c", "student.yaml", f"train.teacher={run_dir}", "run.name=student", "run.seed=3")
    assert done.code == 0, done.err
    assert checkpoint.run_config(workdir / "runs" / "student").train.teacher == run_dir
    assert lmtrain("eval", "--run", "runs/student", "--limit", "50").code == 0
