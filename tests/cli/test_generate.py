"""`lmtrain generate` as a user types it: prompts from everywhere, and every mistake that a user can make with it."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Lmtrain

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = ["--precision", "fp32"]
BEAMS = ["--beams", "4", "--results", "3", "--length-penalty", "1"]


def give(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Standard input, which is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_one_prompt(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("generate", "The river", "-n", "5", "--json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    (completion,) = result["completions"]
    assert (result["id"], result["prompt"], result["run"], result["weights"]) == (1, "The river", "runs/default", "ema")
    assert len(completion["ids"]) == len(completion["tokens"]) == 5
    assert completion["score"] == completion["log_prob"] == pytest.approx(sum(completion["token_log_probs"]))
    assert completion["reason"] == "length"
    assert result["timings"]["tokens_per_second"] > 0
    plain = lmtrain("generate", "The river", "-n", "5")
    assert plain.out == ("The river" + completion["text"]).removesuffix("\n") + "\n"


def test_beams_print_their_scores_best_first(lmtrain: Lmtrain, workdir: Path) -> None:
    greedy = json.loads(lmtrain("generate", "The river", "-n", "5", *EXACT, "--json").out)["completions"][0]
    lines = lmtrain("generate", "The river", "-n", "5", *BEAMS, "--ban", "\n").out.splitlines()
    scores = [float(line.split("\t")[0]) for line in lines]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    best = json.loads(lmtrain("generate", "The river", "-n", "5", *EXACT, "-b", "4", "--json").out)["completions"][0]
    assert best["score"] >= greedy["score"] - 1e-4  # beams share a batch, which may round another way
    for stopping in ("first", "never"):
        assert lmtrain("generate", "x", "-n", "3", "-b", "2", "--beam-stopping", stopping).code == 0


def test_of_several_texts_each_is_one_line(lmtrain: Lmtrain, workdir: Path) -> None:
    prompt = "the\tC:\\new \r\nriver"
    arguments = [
        "generate",
        prompt,
        "-n",
        "8",
        "--raw",
        "--bias",
        "\n=8",
        "--seed",
        "1",
        "--samples",
        "3",
        "--results",
        "3",
    ]
    texts = [item["text"] for item in json.loads(lmtrain(*arguments, "--json").out)["completions"]]
    assert any("\n" in text for text in texts)
    lines = lmtrain(*arguments).out.removesuffix("\n").split("\n")
    assert len(lines) == 3
    unescaped = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
    for line, text in zip(lines, texts, strict=True):
        _, escaped = line.split("\t")
        found = re.sub(r"\\.", lambda pair: unescaped[pair[0]], escaped)
        assert found == (prompt + text).removesuffix("\n")


ESCAPE = "\x1b]0;owned\x07\x9b2J"


def test_a_terminal_gets_no_control_characters(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt, a file name, a key, or an option; what is piped stays as it is."""
    assert ESCAPE in lmtrain("generate", f"the {ESCAPE}", "-n", "2", "--raw").out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for options in ([], ["--beams", "2"], ["--json"]):
        done = lmtrain("generate", f"the {ESCAPE}é", "-n", "2", "--raw", *options)
        assert done.code == 0
        assert "\\x9b2Jé" in done.out or "\\u009b2Jé" in done.out
        assert done.out.replace("\n", "").isprintable()
        assert "read as <unk>: \\x1b]0;" in done.err
    for arguments in (
        ["generate", "--prompts", f"{ESCAPE}.txt"],
        ["train", f"model.{ESCAPE}=1"],
        ["eval", f"--{ESCAPE}"],
        ["tokenize", "a", ESCAPE],
        ["eval", "--run", ESCAPE],
    ):
        done = lmtrain(*arguments)
        assert done.code in (1, 2)
        assert "x1b]0;owned" in done.err
        assert done.err.replace("\n", "").isprintable()


def test_every_precision_is_close_to_the_exact_one(lmtrain: Lmtrain, workdir: Path) -> None:
    def first(*options: str) -> float:
        done = lmtrain("generate", "The river", "-n", "1", "--json", *options)
        assert done.code == 0, done.err
        found: float = json.loads(done.out)["completions"][0]["log_prob"]
        return found

    exact = first(*EXACT)
    others = [first("--precision", name) for name in ("bf16", "fp16", "int8")]
    assert others == pytest.approx([exact] * 3, abs=0.05)
    assert exact not in others
    assert first() in (exact, others[0])


def test_sampling_depends_on_its_seed(lmtrain: Lmtrain, workdir: Path) -> None:
    def text(*options: str) -> str:
        done = lmtrain("generate", "The river", "-n", "12", *options)
        assert done.code == 0, done.err
        return done.out

    assert text("--sample") == text("--sample", "--seed", "0") == text("--temperature", "1")
    assert text("--sample") != text("--seed", "1")
    assert text("--temperature", "0") == text() == text("--top-k", "1")
    several = text("--samples", "4", "--results", "4", "--length-penalty", "1", "--ban", "\n")
    scores = [float(line.split("\t")[0]) for line in several.splitlines()]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 4
    assert text("--samples", "4", "--length-penalty", "1", "--ban", "\n").strip() in several


@pytest.mark.parametrize("search", [["--temperature", "1.5"], BEAMS, ["--stop", "line"]], ids=" ".join)
def test_many_prompts_in_batches_are_what_each_gives_alone(lmtrain: Lmtrain, workdir: Path, search: list[str]) -> None:
    prompts = ["The river", "A", "the town of the river of the town of the river", "In 1950 , the"]
    (workdir / "many.txt").write_text("\n".join(prompts))
    arguments = ["generate", "--prompts", "many.txt", "-n", "20", "--json", *EXACT, *search]
    results = []
    for size in ("1", "3", "16"):
        done = lmtrain(*arguments, "--batch-size", size)
        assert done.code == 0, done.err
        results.append([json.loads(line) for line in done.out.splitlines()])
    for alone, *others in zip(*results, strict=True):
        for other in others:
            assert (alone["id"], alone["prompt"]) == (other["id"], other["prompt"])
            for one, same in zip(alone["completions"], other["completions"], strict=True):
                assert one["ids"] == same["ids"]
                assert one["text"] == same["text"]
                assert one["token_log_probs"] == pytest.approx(same["token_log_probs"], abs=1e-5)
    assert [result["prompt"] for result in results[0]] == prompts
    assert [result["id"] for result in results[0]] == [1, 2, 3, 4]


def test_prompts_from_json_lines_and_standard_input(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'{"prompt": "The river", "id": "a"}\n{"prompt": "A xyzzy"}\n{"prompt": "' + b"the " * 20 + b'"}\n'
    (workdir / "many.jsonl").write_bytes(lines)
    done = lmtrain("generate", "--prompts", "many.jsonl", "-n", "2", "--json")
    assert [json.loads(line)["id"] for line in done.out.splitlines()] == ["a", 2, 3]
    assert "1 of 3 prompts have words that are not in the vocabulary" in done.err
    assert "1 of 3 prompts are longer than the context 16" in done.err
    give(monkeypatch, lines)
    again = lmtrain("generate", "--prompts", "-", "-n", "2")
    assert again.code == 0
    assert again.out.startswith("The river")
    give(monkeypatch, b"The river\n")
    assert lmtrain("generate", "-n", "2").out == lmtrain("generate", "The river", "-n", "2").out


def test_results_come_before_the_next_prompts_are_read(workdir: Path) -> None:
    command = [sys.executable, "-m", "lmtrain", "generate", "--prompts", "-", "--batch-size", "1", "-n", "2", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        for number in (1, 2):
            process.stdin.write(b"The river\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdout.close()
        process.stdin.write(b"The river\n" * 3)
        process.stdin.close()
        assert process.wait(60) == 1
        assert process.stderr.read() == b""  # a pipe that nobody reads any more is no news


def test_text_is_put_together_unless_raw(lmtrain: Lmtrain, workdir: Path) -> None:
    favoured = ["--bias", ",=50", "--bias", "@,@=49", "--no-repeat-ngram", "2"]
    arguments = ["generate", "The river , a", "-n", "4", *favoured]
    assert lmtrain(*arguments).out == "The river, a,,,,\n"
    assert lmtrain(*arguments, "--raw").out == "The river , a , , @,@ ,\n"


def test_plain_prompts_are_read_like_spaced_out_ones(
    lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, spaced = "The river (in 16), 1,200.8; the", "The river ( in 16 ) , 1 @,@ 200 @.@ 8 ; the"
    (workdir / "one.txt").write_text(plain)
    (workdir / "one.jsonl").write_text(json.dumps({"prompt": plain}))

    def answer(prompt: str, *arguments: str) -> tuple[object, str]:
        done = lmtrain("generate", *arguments, "-n", "4", "--json", *EXACT)
        assert done.code == 0, done.err
        result = json.loads(done.out)
        assert result["prompt"] == prompt
        return result["completions"], done.err

    expected = answer(spaced, spaced)
    assert "vocabulary" not in expected[1]
    for arguments in ([plain], ["--prompts", "one.txt"], ["--prompts", "one.jsonl"], []):
        give(monkeypatch, plain.encode())
        assert answer(plain, *arguments) == expected
    assert "read as <unk>: (in, 16),, 1,200.8;\n" in answer(plain, plain, "--raw")[1]
    assert "1 of 1 prompts have words" in answer(plain, "--raw", "--prompts", "one.txt")[1]
    assert "read as <unk>: xyzzy-zyx\n" in answer("the xyzzy-zyx,", "the xyzzy-zyx,")[1]
    shown = lmtrain("generate", plain, "-n", "4").out
    assert shown.startswith(plain)
    assert shown == lmtrain("generate", spaced, "-n", "4").out


def test_stops_and_words(lmtrain: Lmtrain, workdir: Path) -> None:
    def completion(*options: str) -> dict[str, object]:
        done = lmtrain("generate", "The river", "-n", "30", "--json", *options)
        assert done.code == 0, done.err
        result: dict[str, object] = json.loads(done.out)["completions"][0]
        return result

    every = completion("--bias", "the=60")
    assert every["text"] == " the" * 30
    stopped = completion("--bias", "the=60", "--stop-string", "xyz", "--stop-string", "e t")
    assert (stopped["text"], stopped["reason"]) == (" th", "stop string 'e t'")
    sentence = completion("--bias", ".=60", "--stop", "sentence", "--min-tokens", "2", "--bias", "the=59")
    assert (sentence["text"], sentence["reason"]) == (" the.", "sentence")
    assert "<unk>" in str(completion("--bias", "<unk>=90", "--allow-unk")["text"])
    assert "<unk>" not in str(completion("--bias", "<unk>=90")["text"])
    assert "the" not in str(completion("--bias", "the=60", "--ban", "the")["text"]).split()


def test_show_attention_draws_a_picture(lmtrain: Lmtrain, workdir: Path) -> None:
    done = lmtrain("generate", "The river", "-n", "60", "--show-attention", "pool.png")
    assert done.code == 0, done.err
    assert "pool.png shows the first 48 words" in done.err
    with Image.open(workdir / "pool.png") as picture:
        assert picture.height > 3 * 48 * 20


def test_a_prompt_that_is_empty_long_or_strange_gets_a_note(lmtrain: Lmtrain, workdir: Path) -> None:
    for precision in ("auto", "int8"):
        done = lmtrain("generate", "", "-n", "2", "--precision", precision)
        assert done.code == 0
        assert "the prompt is empty" in done.err
    done = lmtrain("generate", "the " * 40, "-n", "2")
    assert done.code == 0
    assert "only the last 16 are read" in done.err
    done = lmtrain("generate", "the xyzzy the xyzzy", "-n", "2")
    assert done.code == 0
    assert "read as <unk>: xyzzy\n" in done.err


MISTAKES = {
    "no prompt at all": ([], "no prompt: give one"),
    "prompt and prompts": (["x", "--prompts", "good.txt"], "exclude each other"),
    "more results than beams": (["x", "--results", "2"], "--results 2 is more than --beams 1"),
    "more results than samples": (["x", "--sample", "--results", "2"], "--results 2 is more than --samples 1"),
    "beams that draw": (["x", "--beams", "2", "--top-p", "0.9"], "--beams 2 searches and --top-p draws"),
    "beams with a seed": (["x", "--beams", "2", "--seed", "0"], "--beams 2 searches and --seed draws"),
    "beams and repetition": (["x", "--beams", "2", "--repetition-penalty", "1.2"], "--no-repeat-ngram"),
    "stopping without beams": (["x", "--beam-stopping", "first"], "--beam-stopping first"),
    "samples of one text": (["x", "--samples", "2", "--temperature", "0"], "temperature 0"),
    "temperature": (["x", "--temperature", "inf"], "temperature=inf"),
    "top-p": (["x", "--top-p", "0"], "top_p=0"),
    "repetition": (["x", "--repetition-penalty", "0"], "repetition_penalty=0"),
    "least above most": (["x", "--min-tokens", "9", "-n", "3"], "min_tokens=9"),
    "empty stop string": (["x", "--stop-string", ""], "stop string is empty"),
    "half a stop character": (["x", "--stop-string", "a\udcff"], "a stop string has a lone surrogate"),
    "empty ban": (["x", "--ban", ""], "--ban is empty"),
    "unknown ban": (["x", "--ban", "xyzzy"], "--ban 'xyzzy' is not in the vocabulary"),
    "two words": (["x", "--bias", "the river=1"], "--bias 'the river' is 2 words"),
    "bias without number": (["x", "--bias", "the"], "--bias 'the' is not WORD=NUMBER"),
    "bias that is no number": (["x", "--bias", "the=x"], "is not WORD=NUMBER"),
    "endless bias": (["x", "--bias", "the=inf"], "no finite number"),
    "huge bias": (["x", "--bias", "the=1e9"], "1e6"),
    "missing prompts": (["--prompts", "nowhere.txt"], "nowhere.txt can't be read"),
    "no prompts": (["--prompts", "empty.txt"], "empty.txt has no prompts"),
    "damaged prompts": (["--prompts", "bad.jsonl"], "bad.jsonl, line 2, is not JSON"),
    "latin prompts": (["--prompts", "latin.txt"], "latin.txt, line 1, is not UTF-8"),
    "picture of many": (["--prompts", "good.txt", "--show-attention", "x.png"], "--show-attention"),
    "picture of no kind": (["x", "--show-attention", "x.txt"], "FILE.png"),
    "picture nowhere": (["x", "--show-attention", "nowhere/x.png"], "the folder of nowhere/x.png"),
    "half a character": (["\ud800"], "lone surrogate"),
}
FAILURES = {
    *("no prompt at all", "missing prompts", "no prompts", "damaged prompts", "latin prompts"),
    *("picture nowhere", "half a character"),
}
"""The command is right, and what it names or is given is not."""
FILES = {"good.txt": b"x\n", "empty.txt": b"\n", "bad.jsonl": b'\n{"prompt": \n', "latin.txt": b"caf\xe9\n"}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_clear_sentence(
    lmtrain: Lmtrain, workdir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, content in FILES.items():
        (workdir / file).write_bytes(content)
    give(monkeypatch, b"")
    arguments, message = MISTAKES[name]
    done = lmtrain("generate", *arguments)
    assert done.code == (1 if name in FAILURES else 2), done
    assert done.out == ""
    assert message in done.err
    assert "Traceback" not in done.err
    assert done.err.count("lmtrain: ") == 1


WRONG_USAGE = [
    ["--top-k", "0"],
    ["--beams", "0"],
    ["--stop", "word"],
    ["--samples", "x"],
    ["--length-penalty", "nan"],
    ["--length-penalty", "400"],  # which no power of a length could be divided by
    ["--length-penalty", "-400"],
]


@pytest.mark.parametrize("arguments", WRONG_USAGE)
def test_wrong_usage_exits_with_two(lmtrain: Lmtrain, arguments: list[str]) -> None:
    done = lmtrain("generate", "x", *arguments)
    assert done.code == 2
    assert f"'{arguments[0]}'" in done.err


def test_an_output_that_cannot_hold_the_text(lmtrain: Lmtrain, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    done = lmtrain("generate", "né", "-n", "1")
    assert done.code == 1
    assert done.err.endswith("lmtrain: 'é' can't be written in ascii: set PYTHONIOENCODING=utf-8\n")


def test_help_is_in_groups(lmtrain: Lmtrain) -> None:
    out = lmtrain("generate", "-h").out
    groups = [line for line in out.splitlines() if line and not line.startswith(" ") and line.endswith(":")]
    assert len(groups) == 7
    assert out.index("Sampling:") < out.index("--temperature") < out.index("Beam search") < out.index("--beams")


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
