"""`lmtrain generate` as a user types it: prompts from everywhere, and what is printed for them."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmtrain.cli import prompting
from lmtrain.generation.options import SAMPLED, Options
from tests.helpers import Lmtrain, give_input

EXACT = ["--precision", "fp32"]


def test_a_prompt_gets_one_text_with_its_figures(lmtrain: Lmtrain, workdir: Path) -> None:
    result = lmtrain("generate", "The river", "-n", "5", "--greedy", "--json").json
    (completion,) = result["completions"]
    assert (result["prompt"], result["run"], result["weights"]) == ("The river", "runs/sample", "ema")
    assert len(completion["ids"]) == len(completion["tokens"]) == 5
    assert completion["score"] == completion["log_prob"] == pytest.approx(sum(completion["token_log_probs"]))
    assert completion["reason"] == "length"
    assert result["timings"]["tokens_per_second"] > 0
    assert result["seed"] is None
    plain = lmtrain("generate", "The river", "-n", "5", "--greedy")
    assert plain.out == ("The river" + completion["text"]).removesuffix("\n") + "\n"


def test_the_checkpoint_and_the_weights_are_those_asked_for(lmtrain: Lmtrain, workdir: Path) -> None:
    result = lmtrain("generate", "The river", "-n", "1", "--checkpoint", "10", "--weights", "raw", "--json").json
    assert (result["step"], result["weights"]) == (10, "raw")


@pytest.mark.parametrize(
    "options", [["--beams", "4", "--results", "3", "--length-penalty", "1"], ["--samples", "3", "--temperature", "1"]]
)
def test_several_texts_are_separated_and_scored_best_first(lmtrain: Lmtrain, workdir: Path, options: list[str]) -> None:
    seed = ["--seed", "1"] if "--samples" in options else []
    arguments = ["generate", "the\tC:\\new\nriver", "-n", "150", *options, *seed]
    texts = lmtrain(*arguments, "--json").json["completions"]
    assert any("\n" in text["text"] for text in texts)
    assert [text["score"] for text in texts] == sorted((text["score"] for text in texts), reverse=True)
    expected = "".join(
        f"--- {number} of 3: log-probability {text['log_prob']:.2f} "
        f"({-text['log_prob'] / len(text['ids']):.2f} nats per token)\n"
        + (arguments[1] + text["text"]).removesuffix("\n")
        + "\n"
        for number, text in enumerate(texts, start=1)
    )
    assert lmtrain(*arguments).out == expected


def test_every_precision_is_close_to_the_exact_one(lmtrain: Lmtrain, workdir: Path) -> None:
    def first(*options: str) -> float:
        done = lmtrain("generate", "The river", "-n", "1", "--greedy", "--json", *options)
        return float(done.json["completions"][0]["log_prob"])

    exact = first(*EXACT)
    others = [first("--precision", name) for name in ("bf16", "fp16")]
    assert others == pytest.approx([exact] * 2, abs=0.05)
    assert exact not in others
    assert first() in (exact, others[0])


def test_a_printed_seed_repeats_the_text_and_explicit_options_are_the_defaults(lmtrain: Lmtrain, workdir: Path) -> None:
    arguments = ["generate", "The river", "-n", "12"]
    first, second = lmtrain(*arguments), lmtrain(*arguments)
    assert first.out != second.out
    seeded = re.fullmatch(r"runs/sample, step \d+, seed (\d+): (--seed) \1 repeats this output\n", first.err)
    assert seeded is not None
    again = lmtrain(*arguments, "--seed", seeded[1], "--temperature", "0.8", "--top-p", "0.95")
    assert (again.out, again.err) == (first.out, "")
    saved = lmtrain(*arguments, "--json").json
    assert lmtrain(*arguments, "--seed", str(saved["seed"]), "--json").json["completions"] == saved["completions"]
    assert lmtrain(*arguments, "--quiet").err == ""
    greedy = lmtrain(*arguments, "--greedy")
    assert greedy.err == ""
    assert greedy.out == lmtrain(*arguments, "--temperature", "0").out == lmtrain(*arguments, "--top-k", "1").out


def test_prompts_are_read_from_json_lines_and_standard_input(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["The river", "A xyzzy", "the " * 20]
    (workdir / "many.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    done = lmtrain("generate", "--prompts", "many.jsonl", "-n", "2", "--json")
    assert [json.loads(line)["prompt"] for line in done.out.splitlines()] == prompts
    assert "not in the vocabulary: xyzzy\n" in done.err
    assert "a prompt has 20 tokens and the context 16" in done.err
    give_input(monkeypatch, b"The river\nA river\n")
    again = lmtrain("generate", "--prompts", "-", "-n", "2", "--json")
    assert [json.loads(line)["prompt"] for line in again.out.splitlines()] == ["The river", "A river"]
    give_input(monkeypatch, b"The river\n")
    greedy = lmtrain("generate", "-n", "2", "--greedy").out
    assert greedy == lmtrain("generate", "The river", "-n", "2", "--greedy").out


def test_prompts_are_completed_in_batches_and_numbered_through(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[tuple[int, int]] = []
    monkeypatch.setattr(prompting, "_complete", lambda _, __, batch, first, ___: batches.append((first, len(batch))))
    give_input(monkeypatch, b"The river\n" * 5)
    assert lmtrain("generate", "--prompts", "-", "--batch-size", "2").code == 0
    assert batches == [(0, 2), (2, 2), (4, 1)]


def test_results_come_before_the_next_prompts_are_read(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    command = [sys.executable, "-m", "lmtrain", "generate", "--prompts", "-", "--batch-size", "1", "--greedy", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for prompt in ("The river", "the river"):
            process.stdin.write(f"{prompt}\n".encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["prompt"] == prompt
        process.stdout.close()
        process.stdin.write(b"The river\n" * 3)
        process.stdin.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""  # a pipe that nobody reads anymore is no news


def test_plain_prompts_are_read_like_spaced_out_ones(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, spaced = "The river (in 15), 1,200.8; the", "The river ( in 15 ) , 1 @,@ 200 @.@ 8 ; the"
    (workdir / "one.txt").write_text(plain)

    def answer(*arguments: str) -> tuple[object, str]:
        done = lmtrain("generate", *arguments, "-n", "4", "--greedy", "--json", *EXACT)
        return done.json["completions"], done.err

    expected = answer(spaced)
    assert "vocabulary" not in expected[1]
    for arguments in ([plain], ["--prompts", "one.txt"], []):
        give_input(monkeypatch, plain.encode())
        assert answer(*arguments) == expected
    assert f"not in the vocabulary: {'x' * 200}\n" in answer("x" * 300)[1]
    printed = [
        lmtrain("generate", prompt, "-n", "4", "--greedy").out.removeprefix(prompt) for prompt in (plain, spaced)
    ]
    assert printed[0] == printed[1]


def test_a_prompt_may_be_empty_and_a_long_one_gets_a_note(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("generate", "", "-n", "2")
    assert done.code == 0
    done = lmtrain("generate", "the " * 40, "-n", "2")
    assert done.code == 0
    assert "a prompt has 40 tokens and the context 16: only the last 16 are read" in done.err


def test_the_compiler_is_not_loaded(workdir: Path) -> None:
    """It would take longer than all the rest; what brings it in is easily called."""
    code = (
        "import sys, lmtrain.cli.app\n"
        "sys.argv = ['lmtrain', 'generate', 'The river', '-n', '2']\n"
        "try: lmtrain.cli.app.main()\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'torch._dynamo' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split()[-2:] == ["True", "False"]


def test_every_option_of_a_completion_arrives(lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No field has its default then, so that none can be forgotten between the command and the library."""
    seen: list[Options] = []
    monkeypatch.setattr("lmtrain.cli.prompting.complete_prompts", lambda _run, options, *_rest: seen.append(options))
    sampling = "--temperature 0.7 --top-k 7 --top-p 0.6 --repetition-penalty 1.5"
    others = "--max-tokens 9 --samples 3 --seed 5 --results 2 --length-penalty 0.5 --stop line"
    stops = "--stop-string x --stop-string y"
    assert lmtrain("generate", "The", *sampling.split(), *others.split(), *stops.split()).code == 0
    assert lmtrain("generate", "The", "--beams", "3").code == 0
    assert lmtrain("generate", "The", "--seed", "0").code == 0
    (options, search, plain), defaults = seen, Options()
    sampled = Options(temperature=0.7, top_k=7, top_p=0.6, repetition_penalty=1.5, samples=3, seed=5)
    ended: dict[str, Any] = {
        "max_tokens": 9,
        "results": 2,
        "length_penalty": 0.5,
        "stop": "line",
        "stop_strings": ("x", "y"),
    }
    assert options == dataclasses.replace(sampled, **ended)
    assert search.beams == 3
    assert plain == SAMPLED
    fields = [field.name for field in dataclasses.fields(Options)]
    assert {name for name in fields if getattr(options, name) == getattr(defaults, name)} == {"beams"}
