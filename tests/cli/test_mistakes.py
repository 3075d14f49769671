"""Every mistake that a user can make with the commands ends in one clear message, and in the right exit code."""

import io
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers import TINY, Lmtrain, give_input

FILES = {
    "empty.txt": b"",
    "short.txt": b"one two three\n" * 30,
    "own.txt": b"a b c d e f\n" * 200,
    "type.yaml": b"model:\n  dim: wide\n",
}
TRAIN = ["train", "run.name=new", "train.steps=1", "--quiet"]
WRONG_USAGE = {
    "unknown command": (["trian"], "No such command 'trian'"),
    "unknown option": (["train", "--confg", "x"], "--confg"),
    "a field as an option": (["train", "--lr", "3e-4"], "A field is set without dashes, as section.field=value; "),
    "unknown precision": (["eval", "--precision", "fp12"], "'--precision'"),
    "unknown checkpoint": (["eval", "--checkpoint", "newest"], "neither best, last nor a step number"),
    "no tokens": (["generate", "x", "-n", "0"], "max_tokens=0: Input should be greater than 0"),
    "fields as JSON": (["train", "--fields", "--json"], "leave --json, --config and --resume out"),
    "unknown override": ([*TRAIN, "train.ler=1"], "did you mean train.lr (Peak"),
    "two sources": (
        ["tokenize", "own.txt", "short.txt"],
        "a source comes before the overrides",
    ),
    "a source and data.source": (
        ["tokenize", "own.txt", "data.source=short.txt"],
        "the source is 'own.txt' or data.source: leave one of them out",
    ),
    "a batch of too many prompts": (["generate", "x", "--batch-size", "9" * 20], "'--batch-size'"),
    "an override with spaces": (["train", "train.lr", "=", "0.1"], "override '=' is not of the form"),
    "all cache": (["eval", "--cache", "eval.cache_weight=1"], "cache_weight=1: should be less than 1"),
    "the model of a run": (["eval", "model.dim=8"], "(-h) and eval.FIELD=VALUE, data.FIELD=VALUE, run."),
    "a run as an override": (["eval", "runs/sample"], "'runs/sample' is not an override: --text FILE scores a file"),
    "more results than texts": (["generate", "x", "--results", "5"], "results=5 is more than samples or beams"),
    "a configuration as a source": (["train", "type.yaml"], "type.yaml is a configuration: write `-c type.yaml`"),
    "a recipe as a source": (["train", "wikitext2-cpu"], "wikitext2-cpu is a configuration: write `-c wikitext2-cpu`"),
    "a long override first": (["download", f"data.source={'x' * 5000}", "a"], "not of the form section.field=value"),
    "a seed as a field": (
        ["generate", "The", "run.seed=7"],
        "generate accepts only its options (-h) and run.name=VALUE",
    ),
    "a prompt after an override": (["generate", "run.name=sample", "Once"], "put the prompt before the overrides"),
    "a prompt without quotes": (
        ["generate", "The", "river"],
        "quote it if it has several words: lmtrain generate 'The river'",
    ),
    "a prompt with a dash": (["generate", "-5 degrees"], "begins with - needs -- before it."),
    "a run and its name": (["eval", "--run", "sample", "run.name=other"], "give --run or run.name, not both"),
    "another name to resume": (["train", "--resume", "sample", "run.name=other"], "leave --config and run.name out"),
    "a split and a text": (["eval", "--split", "test", "--text", "short.txt"], "give --split or --text, not both"),
    "a dry run with a profile": (
        ["train", "--dry-run", "--profile"],
        "give only one of --fields, --dry-run and --profile",
    ),
    "no such field": (["train", "--fields", "x1"], "the sections are run, data, tokenizer, model, train, eval"),
    "prompt and prompts": (["generate", "x", "--prompts", "own.txt"], "give a prompt or --prompts, not both"),
    "greedy beams": (
        ["generate", "x", "--greedy", "-b", "2", "--top-k", "9"],
        "--greedy can't be combined with --beams, --top-k",
    ),
    "beams and repetition": (["generate", "x", "--beams", "2", "--repetition-penalty", "1.2"], "lmtrain: beam search"),
}
"""The command or the configuration is wrong: exit code 2."""
FAILURES = {
    "a source longer than a file's name": (["train", "x" * 300], "is not a file or folder here, not a hub id"),
    "a configuration longer than that": (["train", "-c", "x" * 300], f"configuration {'x' * 300} can't be read: File"),
    "a run as a text": (
        [*TRAIN, "data.source=runs/sample"],
        "sample is a run, not a text: resume it with `lmtrain train --resume",
    ),
    "a file in the way": ([*TRAIN, *TINY[:7], "run.dir=empty.txt"], "can't write empty.txt/new: File exists"),
    "CUDA on a machine without": ([*TRAIN, *TINY[:7], "train.device=cuda"], "use cpu or auto in place of cuda"),
    "CUDA to evaluate": (["eval", "--device", "cuda"], "use cpu or auto in place of cuda"),
    "no run of this name": (["eval", "run.name=nowhere"], "there is no run runs/nowhere; the runs in runs: sample"),
    "another corpus": (
        ["eval", "data.source=own.txt"],
        "or is another one, so its test split may contain text that the run was trained on. --text",
    ),
    "half a character": (["generate", "The \ud800"], "lone surrogate at character 4"),
    "no prompt at all": (["generate"], "no prompt: give one"),
}
"""The command is right, and what it names or reads is not: exit code 1."""
MISTAKES = {name: (2, *mistake) for name, mistake in WRONG_USAGE.items()}
MISTAKES |= {name: (1, *mistake) for name, mistake in FAILURES.items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_clear_message(
    lmtrain: Lmtrain, workdir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, content in FILES.items():
        (workdir / file).write_bytes(content)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    give_input(monkeypatch, b"")
    code, arguments, message = MISTAKES[name]
    done = lmtrain(*arguments)
    assert (done.code, done.out) == (code, ""), done
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.err.count("lmtrain: ") == 1 or "Error: " in done.err


def test_an_output_that_cannot_hold_the_text_gets_a_remedy(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    done = lmtrain("generate", "né", "-n", "1")
    assert done.code == 1
    assert done.err.endswith("lmtrain: 'é' can't be written in ascii: set PYTHONIOENCODING=utf-8\n")
