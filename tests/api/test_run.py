"""A run in Python: its texts and scores are those of the commands, and of the model read by hand."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lmtrain as library
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.generation.options import Options
from tests.helpers import TINY, Lmtrain, messages

TEXT = "The river was small .\nIt was old .\n"


def test_a_run_and_its_data_are_where_the_environment_says(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.load("sample").evaluate(limit=50)
    for folder, field in (("runs", "LMTRAIN_RUN__DIR"), ("data", "LMTRAIN_DATA__DIR")):
        (workdir / folder).rename(workdir / f"other {folder}")
        monkeypatch.setenv(field, f"other {folder}")
    run = library.load()
    assert run.folder == library.load("sample").folder == Path("other runs/sample")
    assert run.config.data.dir == Path("other data")
    assert run.evaluate(limit=50) == before


def test_the_interface_is_listed_for_completion() -> None:
    assert {"Run", "load", "train"} <= set(dir(library))


def test_a_prompt_gives_the_text_of_the_command(lmtrain: Lmtrain, workdir: Path) -> None:
    run = library.load(workdir / "runs/sample", precision="fp32")
    text = run.generate("The river", max_tokens=12, temperature=0.7, seed=3)
    command = ["generate", "The river", "-n", "12", "--temperature", "0.7", "--seed", "3", "--precision", "fp32"]
    assert lmtrain(*command, "--json").json["completions"][0]["text"] == text
    (beam,) = run.generate(["The river"], max_tokens=6, beams=3)
    (found,) = run.complete(["The river"], Options(max_tokens=6, beams=3))
    assert beam == found.completions[0].text
    for prompts in ("The", None, ["The", 5], iter(["The"])):
        with pytest.raises(TypeError, match="prompts must be a list of strings"):
            run.complete(prompts, Options())  # type: ignore[arg-type]
    assert len({run.generate("The", max_tokens=12) for _ in range(5)}) > 1
    for name, value in (("seed", None), ("beams", None), ("temperature", None), ("top_p", "high"), ("topk", 3)):
        with pytest.raises(ValueError, match=rf"for Options\n{name}\n"):
            run.generate("The", **{name: value})


def test_a_greedy_text_is_the_most_likely_next_token_again_and_again(workdir: Path) -> None:
    run = library.load("sample")
    ids = [run.tokenizer.eos_id, *run.tokenizer.encode("The river")]
    prompt = len(ids)
    with torch.no_grad():
        while len(ids) < 12:
            scores = run.model.predict(torch.tensor([ids]))[0, -1]
            scores[run.tokenizer.unk_id] = -math.inf
            ids.append(int(scores.argmax()))
    run = library.load("sample", precision="fp32")
    (found,) = run.complete(["The river"], Options(max_tokens=12 - prompt))
    assert list(found.completions[0].ids) == ids[prompt:]


def test_scores_and_texts_in_fp32_do_not_depend_on_the_callers_autocast(workdir: Path) -> None:
    run = library.load(precision="fp32")

    def figures() -> tuple[object, object]:
        return run.score(TEXT), run.complete(["the"], Options(max_tokens=4))[0].completions[0].log_prob

    with torch.autocast("cpu", torch.bfloat16):
        inside = figures()
    assert inside == figures()


def test_dynamic_evaluation_does_not_depend_on_the_callers_autocast(workdir: Path) -> None:
    """Which would keep the weights before the first step, rounded."""
    run = library.load(precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        inside = run.evaluate(dynamic=True, limit=100)
    assert inside == run.evaluate(dynamic=True, limit=100) != run.evaluate(limit=100)


def test_a_caller_in_inference_mode_changes_neither_the_model_nor_a_dynamic_evaluation(workdir: Path) -> None:
    run, inside = library.load(precision="fp32"), library.load(precision="fp32")
    with torch.inference_mode():
        assert not inside.model.predict(torch.tensor([[0]])).requires_grad
        score = inside.evaluate(dynamic=True, limit=50)
    assert score == run.evaluate(dynamic=True, limit=50)
    assert inside.model.predict(torch.tensor([[0]])).requires_grad


@pytest.mark.parametrize("disabled", [torch.no_grad, torch.inference_mode])
def test_a_caller_without_gradients_can_train(workdir: Path, disabled: Callable[[], Any]) -> None:
    config = library.load("sample").config
    with disabled():
        run = library.train("train.steps=2", f"run.name={disabled.__name__}", config=config, quiet=True)
    assert run.step == 2


def test_training_leaves_the_callers_random_numbers_and_number_of_threads(workdir: Path, two_threads: None) -> None:
    before = torch.get_rng_state()
    library.train(*TINY, "run.name=one", "run.seed=7", quiet=True)  # with one thread, and no other run has this seed
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 2


def test_another_default_dtype_is_rejected_by_that_name_and_before_a_run_is_made(workdir: Path) -> None:
    config = library.load("sample").config
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(LmtrainError, match=r"default dtype is torch\.float64.*set_default_dtype"):
            library.train("train.steps=2", "run.name=double", config=config, quiet=True)
        with pytest.raises(LmtrainError, match=r"default dtype is torch\.float64.*set_default_dtype"):
            library.load("sample")
    finally:
        torch.set_default_dtype(torch.float32)
    assert not (workdir / "runs/double/config.yaml").exists()


def test_another_default_device_is_rejected_before_a_run_is_made(workdir: Path) -> None:
    with torch.device("meta"), pytest.raises(LmtrainError, match=r"default device is meta.*train\.device"):
        library.train(*TINY, "run.name=other", quiet=True)
    assert not (workdir / "runs/other/config.yaml").exists()


def test_the_score_of_a_text_is_that_of_its_tokens_one_by_one(lmtrain: Lmtrain, workdir: Path) -> None:
    run = library.load()
    score = run.score(TEXT)
    ids = [run.tokenizer.eos_id, *run.tokenizer.encode(TEXT)]
    expected = []
    with torch.no_grad():
        for end in range(1, len(ids)):
            log_probs = run.model.predict(torch.tensor([ids[:end][-16:]]))[0, -1]
            expected.append(-float(log_probs[ids[end]]))
    assert (score.tokens, score.words, score.bytes) == (len(expected), 11, len(TEXT))
    found = run.score_tokens(TEXT, stride=1)
    assert [token for token, _ in found] == [run.tokenizer.token(index) for index in ids[1:]]
    assert [nats for _, nats in found] == pytest.approx(expected, abs=1e-4)
    assert run.score(TEXT, stride=1).nats == pytest.approx(sum(expected), rel=1e-5)
    (workdir / "own.txt").write_text(TEXT)
    assert lmtrain("eval", "--text", "own.txt", "--json").json["nats"] == score.nats
    assert run.score(f"\ufeff{TEXT}").nats == score.nats  # a byte order mark is no text, as in a file
    assert run.score(TEXT.removesuffix("\n")).nats == score.nats  # the last line needs no end
    with pytest.raises(LmtrainError, match="the text has no words"):
        run.score(" ")
    with pytest.raises(LmtrainError, match="the text has a lone surrogate at character 2"):
        run.score("a \ud800")
    with pytest.raises(TypeError, match="the text must be a str or a Path, not bytes"):
        run.score(b"a")  # type: ignore[arg-type]
    for wrong in ({"device": "gpu"}, {"weights": "best"}, {"precision": "fp8"}):
        with pytest.raises(UsageError, match="choose one of"):
            library.load("sample", **wrong)
    next(run.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(LmtrainError, match="the score is not finite: use another checkpoint, or fp32"):
        run.score(TEXT)


def test_an_evaluation_is_that_of_the_command(lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = library.load("sample")
    for settings, options in (
        ({"stride": 8, "limit": 300}, ["eval.stride=8", "--limit", "300"]),
        ({"cache": True, "cache_weight": 0.2, "limit": 300}, ["--cache", "eval.cache_weight=0.2", "--limit", "300"]),
        ({"dynamic": True, "limit": 200}, ["--dynamic", "--limit", "200"]),
    ):
        expected = lmtrain("eval", "--split", "test", *options, "--json").json
        assert run.evaluate("test", **settings).summary().items() <= expected.items()
    moved = (workdir / "data").rename(workdir / "elsewhere")
    monkeypatch.setattr("lmtrain.api.run.build_predictor", None)  # the model exists
    assert run.evaluate(data_dir=moved, limit=50, dynamic=True).tokens == 50
    assert not (workdir / "data").exists()
    with pytest.raises(LmtrainError, match=r"dynamic evaluation diverged: lower eval\.dynamic_rate"):
        run.evaluate(data_dir=moved, limit=50, dynamic=True, dynamic_rate=1e12)
    with pytest.raises(LmtrainError, match="has no dev split"):
        run.evaluate("dev", data_dir=moved)
    rejected: list[tuple[dict[str, Any], str]] = [
        ({"strid": 3}, r"^the configuration: unknown field eval\.strid"),
        ({"stride": 17}, r"^the configuration: eval\.stride=17"),
        ({"limit": 0}, "limit=0 must be a whole number, at least 1"),
        ({"limit": 2.5}, r"limit=2\.5 must be a whole number"),
    ]
    for wrong, message in rejected:
        with pytest.raises(UsageError, match=message):
            run.evaluate(data_dir=moved, **wrong)


def test_the_messages_of_training_are_shown_unless_it_is_quiet(workdir: Path, notes: list[str]) -> None:
    config = library.load("sample").config
    library.train(config=config, quiet=True)
    assert notes == []
    library.train(config=config)
    assert any("is finished, so nothing is trained" in note for note in notes)


def test_training_from_a_dict_is_that_of_the_command(lmtrain: Lmtrain, workdir: Path) -> None:
    """The run of the command is found finished, so that nothing is trained twice."""
    config = library.load("sample").config
    for again in (
        library.train(config=config, quiet=True),
        library.train(Path("sample"), "train.log_steps=7", quiet=True),
    ):
        assert repr(again) == f"Run(runs/sample, step {library.load('sample').step})"
    sections = {section: dict(fields) for section, fields in config.model_dump(mode="json").items()}
    sections["run"]["name"] = "short"
    with messages() as said:
        run = library.train("train.steps=3", config=sections, quiet=True)
    assert said == []
    assert (run.folder, run.config.train.steps, run.step) == (Path("runs/short"), 3, 3)
    flags = [f"{key}.{name}={json.dumps(value)}" for key, fields in sections.items() for name, value in fields.items()]
    assert lmtrain("train", *flags, "train.steps=3", "run.name=same").code == 0
    theirs = dict(library.load("same").model.named_parameters())
    for name, weight in run.model.named_parameters():
        assert torch.equal(weight, theirs[name])
    for wrong, message in (
        ({"model": {"dims": 3}}, r"unknown field model\.dims"),
        ({"model": None}, "a section holds"),
    ):
        with pytest.raises(UsageError, match=message):
            library.train(config=wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the list of runs is empty"):
        library.load([])


def test_several_runs_are_the_mean_of_their_probabilities(lmtrain: Lmtrain, workdir: Path) -> None:
    """In scores, with the cache, by dynamic evaluation, in texts."""
    lmtrain("train", *TINY, "run.name=other", "run.seed=2", "model.layers=0")
    both = library.load(["sample", "other"], precision="fp32")
    for dynamic in (False, True):
        scored = [library.load(name).score_tokens(TEXT, dynamic=dynamic) for name in ("sample", "other")]
        mean = [-math.log((math.exp(-a) + math.exp(-b)) / 2) for (_, a), (_, b) in zip(*scored, strict=True)]
        assert [value for _, value in both.score_tokens(TEXT, dynamic=dynamic)] == pytest.approx(mean, abs=1e-4)
    options = ["--run", "sample", "--run", "other", "--precision", "fp32"]
    plain, cached, learned = (both.evaluate(limit=200, cache=c, dynamic=d).nats for c, d in ((0, 0), (1, 0), (0, 1)))
    assert len({plain, cached, learned}) == 3
    for option, nats in (("--cache", cached), ("--dynamic", learned)):
        found = lmtrain("eval", *options, "--limit", "200", option, "--json").json
        assert found["nats"] == nats
    assert [member["run"] for member in found["members"]] == ["runs/sample", "runs/other"]
    text = lmtrain("generate", "The", *options, "--greedy", "-n", "8", "--json").json["completions"][0]["text"]
    assert text == both.generate("The", temperature=0, max_tokens=8)
    assert " + runs/other step " in lmtrain("eval", *options, "--limit", "200").out


def test_a_configuration_may_be_named_by_a_text(workdir: Path) -> None:
    config = str(workdir / "runs/sample/config.yaml")
    run = library.train("train.steps=2", "run.name=named", config=config, quiet=True)
    assert (run.folder, run.step) == (Path("runs/named"), 2)


def test_a_trained_run_is_loaded_on_the_device_of_its_training(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("lmtrain.api.train.load", lambda run, device="auto": asked.append(device))
    library.train(config=library.load("sample").config, quiet=True)
    assert asked == ["cpu"]
