"""What a command trains: an automatic recipe, a configuration, or an existing run with its own."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from lmtrain.api.train import train_plan
from lmtrain.config.automatic import MINUTES, automatic
from lmtrain.config.loader import flat
from lmtrain.config.schema import Config, RunConfig
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.storage.run_folder import create_run, default_name, run_config
from lmtrain.training.plan import RunPlan, changed_fields, plan_run, prepare
from tests.data.published import published
from tests.helpers import TINY
from tests.training.helpers import last_hash

BOOK = "One day the old miller, who had no daughter, went to town. He sold his corn, and he came back.\n"
OWN = [*TINY[2:], "train.eval_tokens=50"]


@pytest.fixture
def folder(folder: Path) -> Path:
    Path("book.txt").write_text("".join(BOOK.replace("corn", f"corn {number}") for number in range(200)))
    return folder


def train(plan: RunPlan) -> Config:
    """Train what is wanted; returns the configuration that the run stores."""
    train_plan(plan)
    return run_config(plan.run_dir)


@pytest.mark.parametrize("tokens", [100, 10_000, 1_000_000, 10**9])
@pytest.mark.parametrize("vocab_size", [257, 50_000])
@pytest.mark.parametrize(("cores", "cuda"), [(1, False), (64, False), (200, False), (8, True)])
def test_an_automatic_recipe_fits_any_text(tokens: int, vocab_size: int, cores: int, cuda: bool) -> None:
    config = automatic(tokens, vocab_size, cores, cuda, MINUTES)
    assert 4 * config.model.context <= tokens
    assert config.train.max_minutes == MINUTES
    assert automatic(tokens, vocab_size, cores, cuda, None).train.max_minutes is None
    assert (config.model.output == "adaptive") == (vocab_size > 8192 and not cuda)


@pytest.mark.parametrize(
    ("given", "minutes"), [("train.steps=2", None), ("train.tokens=99", None), ("train.max_minutes=3", 3.0)]
)
def test_a_budget_of_any_kind_replaces_that_of_the_automatic_recipe(
    folder: Path, given: str, minutes: float | None
) -> None:
    plan = plan_run(None, ["data.source=book.txt", given])
    stored = flat(prepare(plan)[0])
    assert f"{given.partition('=')[0]}={stored[given.partition('=')[0]]:g}" == given
    assert stored["train.max_minutes"] == minutes


def test_fields_are_checked_against_the_automatic_recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not against the defaults, whose context is 128 and whose width, 256, is no multiple of 6 heads."""
    monkeypatch.setattr("lmtrain.training.plan.cores", lambda: 2)
    fields = ["data.source=book.txt", "eval.stride=200", "model.heads=6", "train.max_minutes=60", "train.device=cpu"]
    config, _ = prepare(plan_run(None, fields))
    assert (config.model.context, config.model.dim, config.model.heads, config.eval.stride) == (1024, 192, 6, 200)
    with pytest.raises(UsageError, match=r"eval\.stride=1100 is longer than model\.context=1024"):
        plan_run(None, ["data.source=book.txt", "eval.stride=1100"])


def test_the_sizes_follow_from_the_minutes_and_the_dropout_from_the_epochs() -> None:
    def sizes(minutes: float | None) -> tuple[int, float]:
        model = automatic(10**9, 1000, 2, False, minutes, epochs=50).model
        return model.dim, model.dropout

    assert sizes(100.0) == (192, 0)  # the time ends long before the epochs
    assert sizes(None) == (128, 0.2)
    assert automatic(10**9, 1000, 2000, True, MINUTES).model.dim == 384  # a GPU
    texts = (10**4, 10**6, 7 * 10**6 // 3, 7 * 10**6 // 3 + 1, 10**8)
    assert [automatic(tokens, 1000, 2, False, 10).model.dropout for tokens in texts] == [0.2, 0.1, 0.1, 0, 0]
    assert automatic(10**4, 1000, 2, False, MINUTES, epochs=1).model.dropout == 0


@pytest.mark.parametrize(("context", "windows"), [(16, 4), (256, 4), (512, 4), (1024, 2), (4096, 1)])
def test_the_batch_fits_the_context_whatever_decides_it(folder: Path, context: int, windows: int) -> None:
    given = [f"model.context={context}", "train.device=cpu"]
    assert plan_run(None, given).config.train.batch_size == windows
    assert plan_run(None, [*given, f"train.micro_batch={windows}"]).config.train.micro_batch_size == windows
    assert plan_run(None, [*given, "train.batch_size=3", "train.steps=5"]).config.train.batch_size == 3
    create_run(Path("runs/base"), plan_run(None, given).config)
    fine_tuned = plan_run(None, ["run.name=tuned", "train.init_from=runs/base", "train.device=cpu"]).config
    assert (fine_tuned.model.context, fine_tuned.train.batch_size) == (context, windows)


def test_only_the_cores_that_are_used_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.training.plan.cores", lambda: 64)
    for fields, width in (([], 256), (["train.threads=2"], 128)):
        assert plan_run(None, ["train.device=cpu", *fields]).config.model.dim == width


def test_a_gpu_counts_by_its_multiprocessors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmtrain.training.plan.choose_device", lambda name: torch.device("cuda"))
    for count, width in ((132, 384), (6, 256)):
        size = SimpleNamespace(multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, size=size: size)
        config = plan_run(None, []).config
        assert (config.model.dim, config.train.batch_size, config.train.max_minutes) == (width, 8, 10)
    assert plan_run(None, ["model.context=16"]).config.train.batch_size == 32


def test_the_dropout_depends_on_how_often_the_text_is_read_whatever_the_unit_of_the_budget(folder: Path) -> None:
    fields = ["data.source=book.txt", "model.context=16", "train.batch_size=4"]

    def dropout(budget: str) -> float:
        config, store = prepare(plan_run(None, [*fields, budget]))
        assert store.split("train").tokens > 500  # an epoch has 8 steps or more
        return config.model.dropout

    assert [dropout(f"train.{budget}") for budget in ("steps=8", "tokens=512", "epochs=1", "epochs=3")] == [0.0] * 4
    assert [dropout(f"train.{budget}") for budget in ("steps=90000", "tokens=9000000", "epochs=90")] == [0.2] * 3


def test_the_dropout_by_epochs_is_that_of_the_page() -> None:
    found = [automatic(10**6, 1000, 2, False, None, epochs).model for epochs in (3, 8, 14, 28, 29)]
    dropouts = [(model.dropout, model.input_dropout) for model in found]
    assert dropouts == [(0, 0), (0.1, 0.1), (0.1, 0.2), (0.15, 0.3), (0.2, 0.4)]
    assert all(model.output_dropout == model.input_dropout for model in found)


def test_without_a_configuration_it_is_chosen_and_stored_whole(folder: Path) -> None:
    plan = plan_run(None, ["data.source=book.txt", "model.dim=16", "model.layers=1", "model.heads=2", "train.steps=2"])
    assert plan.run_dir == Path("runs/book")
    stored = flat(train(plan))
    assert (stored["model.dim"], stored["train.steps"], stored["train.max_minutes"]) == (16, 2, None)
    assert (stored["train.optimizer"], stored["tokenizer.kind"]) == ("muon", "bpe")
    assert stored["tokenizer.vocab_size"] is not None
    assert (stored["run.name"], stored["data.source"]) == ("book", str(folder / "book.txt"))
    changed = {*changed_fields(run_config(plan.run_dir))}
    assert {"model.dim=16", "train.steps=2", "tokenizer.vocab_size=512"} <= changed
    assert {"model.copy=true", "model.token_shift=true"} <= changed
    assert stored["train.ema"] is not None
    assert (stored["model.attention"], stored["model.attention_window"]) == ("local", 64)


def test_an_existing_run_keeps_its_configuration_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its options, from another working folder, with the text gone, and moved together with its tokens."""
    begun = plan_run(None, ["data.source=book.txt", *OWN, "train.steps=4", "train.eval_steps=2"])
    stored = train(begun)
    whole = last_hash(begun.run_dir)
    fields = [*OWN, "train.batch_size=3", "train.micro_batch=null", "run.name=three", "train.steps=1"]
    train(plan_run(None, ["data.source=book.txt", *fields]))
    split = plan_run(None, ["run.name=three", "train.micro_batch=3"])  # 3 does not divide the default batch
    assert (split.config.train.batch_size, split.config.train.micro_batch) == (3, 3)
    again = plan_run(None, ["run.name=book"])
    assert prepare(again)[0] == stored
    (folder / "book.txt").unlink()
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    found = plan_run(None, [], folder / "runs/book")
    assert prepare(found)[1].folder.parent == folder / "data"
    shutil.move(folder / "runs", "runs")
    shutil.move(folder / "data", "data")
    shutil.rmtree(sorted(Path("runs/book/checkpoints").iterdir())[-1])
    assert train(plan_run(None, [], Path("book"))).data.dir == folder / "elsewhere/data"
    assert last_hash(Path("runs/book")) == whole
    path = Path("runs/book/config.yaml")
    path.write_text(path.read_text().replace(f"dir: {folder / 'elsewhere/data'}", f"dir: /{300 * 'n'}"))
    # The system fails when this folder is looked at, as for one in another user's home.
    assert plan_run(None, [], Path("book")).config.data.dir == folder / "elsewhere/data"


def test_a_run_without_a_checkpoint_does_not_impose_its_configuration(folder: Path) -> None:
    """Such as one that diverged at its first steps."""
    begun = plan_run(None, ["data.source=book.txt", *OWN, "train.steps=2", "train.lr=0.5"])
    train(begun)
    assert plan_run(None, ["data.source=book.txt"]).config.train.lr == 0.5
    shutil.rmtree(begun.run_dir / "checkpoints")
    again = plan_run(None, ["data.source=book.txt"])
    assert again.recipe_overrides is not None
    assert again.config.train.lr != 0.5


def test_a_run_that_starts_from_another_has_its_model_and_tokenizer(folder: Path) -> None:
    """But its own dropout, which here is none, and what is given besides."""
    base = train(plan_run(None, ["data.source=book.txt", *OWN, "model.attention_dropout=0.1"]))
    (folder / "own.txt").write_text("A tale of another river, of which nobody knew.\n" * 100)
    fields = ["data.source=own.txt", "train.init_from=runs/book", "train.steps=2", "train.device=cpu"]
    plan = plan_run(None, fields)
    none = dict.fromkeys(("dropout", "attention_dropout", "input_dropout", "output_dropout"), 0.0)
    assert train(plan).model == base.model.model_copy(update=none)
    tokenizers = [(run / "tokenizer.json").read_bytes() for run in (plan.run_dir, Path("runs/book"))]
    assert tokenizers[0] == tokenizers[1]
    with pytest.raises(LmtrainError, match=r"train\.init_from=runs/book has model\.layers=1, and this run 2"):
        train(plan_run(None, [*fields, "run.name=other", "model.layers=2"]))
    with pytest.raises(UsageError, match=r"takes the tokenizer of that run: leave tokenizer\.kind=word out"):
        plan_run(None, [*fields, "run.name=other", "tokenizer.kind=word"])
    with pytest.raises(LmtrainError, match=r"there is no run .*/book; the runs in runs: book, own$"):
        plan_run(None, ["data.source=own.txt", "train.init_from=book", "run.name=other"])


def test_a_teacher_is_found_from_any_folder(folder: Path) -> None:
    Path("runs/large").mkdir(parents=True)
    Path("runs/large/config.yaml").write_text("")
    plan = plan_run(None, ["data.source=book.txt", "train.teacher=runs/large"])
    assert plan.config.train.teacher == (folder / "runs/large",)


@pytest.mark.parametrize(("name", "stored"), [("my book", None), (".", "book")])
def test_a_run_in_a_folder_of_any_name_stays_readable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, stored: str | None
) -> None:
    begun = plan_run(None, ["data.source=book.txt", *OWN, "train.steps=4", "train.eval_steps=2"])
    train(begun)
    whole = last_hash(begun.run_dir)
    shutil.rmtree(sorted((begun.run_dir / "checkpoints").iterdir())[-1])
    if name == ".":
        monkeypatch.chdir("runs/book")
    else:
        shutil.move("runs/book", f"runs/{name}")
        name = f"runs/{name}"
    train(plan_run(None, [], Path(name)))
    assert run_config(Path(name)).run.name == stored
    assert last_hash(Path(name)) == whole


def test_a_source_that_is_given_is_not_ignored(folder: Path) -> None:
    plan = plan_run(None, ["data.source=book.txt", *OWN])
    stored = train(plan)
    (folder / "book.txt").rename("moved.txt")
    assert train(plan_run(None, ["data.source=book.txt"], plan.run_dir)) == stored  # its tokens are still there
    for field in ("data.source=bok.txt", "data.subset=other", "data.text_column=other"):
        with pytest.raises(LmtrainError, match=r"bo\w*k\.txt is not a file"):
            train(plan_run(None, [field], plan.run_dir))
    assert run_config(plan.run_dir) == stored


def test_a_run_is_not_resumed_with_another_tokenizer(folder: Path) -> None:
    plan = plan_run(None, ["data.source=book.txt", *OWN])
    stored = train(plan)
    Path("given.json").write_text(published("words"))
    in_bytes = ["tokenizer.kind=byte", "tokenizer.vocab_size=null"]
    for fields in (["tokenizer.file=given.json"], ["tokenizer.vocab_size=300"], in_bytes):
        other = plan_run(None, ["run.name=book", *fields])
        with pytest.raises(LmtrainError, match=r"keep it with `.* --resume runs/book`, or choose another run\.name"):
            train(other)
    (folder / "book.txt").unlink()
    with pytest.raises(LmtrainError, match=r"book\.txt is not a file or folder here"):
        train(other)
    assert run_config(plan.run_dir) == stored


def test_a_run_keeps_the_size_of_its_tokenizer_without_its_tokens(folder: Path) -> None:
    plan = plan_run({"data": {"source": "book.txt"}, "run": {"name": "own"}}, [*OWN, "tokenizer.kind=bpe"])
    stored = train(plan)
    assert stored.tokenizer.vocab_size is not None
    shutil.rmtree("data")
    assert prepare(plan)[0].tokenizer == stored.tokenizer


def test_a_bpe_run_of_an_earlier_version_keeps_its_vocabulary(folder: Path) -> None:
    """Those stored no size where none was given, and no absolute paths."""
    plan = plan_run(None, ["data.source=book.txt", *OWN, "tokenizer.kind=bpe", "tokenizer.vocab_size=300"])
    train(plan)
    whole, path = last_hash(plan.run_dir), plan.run_dir / "config.yaml"
    values = yaml.safe_load(path.read_text())
    values["tokenizer"]["vocab_size"] = None
    values["data"] |= {"source": "book.txt", "dir": "data"}
    values["run"] = {"name": None, "dir": "runs", "seed": 1}
    path.write_text(yaml.safe_dump(values))
    for _ in range(2):
        shutil.rmtree(sorted((plan.run_dir / "checkpoints").iterdir())[-1])
        train(plan_run(None, [], plan.run_dir))
        assert last_hash(plan.run_dir) == whole
        shutil.rmtree("data")


def test_the_name_of_a_run_follows_from_its_configuration_or_its_text() -> None:
    for path, name in (
        ("configs/my.yaml", "my"),
        ("runs/my/config.yaml", "my"),
        ("wikitext2-cpu", "wikitext2-cpu"),
        ("texts/my book.txt", "my_book"),
        ("m\u00b2.txt", "m\u00b2"),
        ("owner/name", "name"),
        (".hidden.txt", "hidden"),
    ):
        assert default_name(Path(path)) == name
        assert RunConfig(name=name).name == name
    for nameless in ("...yaml", "-.yaml"):
        with pytest.raises(UsageError, match=rf"can't be named after {re.escape(nameless)}: set run\.name"):
            default_name(Path(nameless))
    with pytest.raises(UsageError, match=r"leave --config and run\.name out"):
        plan_run(Path("a.yaml"), [], Path("runs/a"))
    with pytest.raises(UsageError, match=r"leave --config and run\.name out"):
        plan_run(None, ["run.name = b"], Path("runs/a"))
