"""lm-evaluation-harness scores an exported model as lmtrain does."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.data.tokenizer_file import Kind
from lmtrain.export.hugging_face import export
from lmtrain.model.language_model import LanguageModel
from lmtrain.model.trained import build_trained, trained_weights
from tests.data.helpers import KINDS, LINES, TRAINED
from tests.export.runs import CONTEXT, stored_run
from tests.helpers import CPU, Lmtrain

pytest.importorskip("lm_eval")

import lm_eval.tasks
from lm_eval.models.huggingface import HFLM

README = Path(__file__).parents[2] / "lmtrain/export/README.md"
CHOICES = [
    {"question": "the cat sat on the", "choices": [" mat", " log", " dog and the dog"], "answer": 0},
    {"question": "the dog\nsat", "choices": [" on the log", " on"], "answer": 1},
]
CHOICE_TASK = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: choices.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.fixture(autouse=True)
def tasks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has the files that the page describes, and a task with questions."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    page = README.read_text()
    (folder / "tasks").mkdir()
    (folder / "tasks/own_text.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    (folder / "tasks/words.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (folder / "tasks/choices.yaml").write_text(CHOICE_TASK)
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))


def results(task: str, **options: Any) -> Any:
    """What the harness measures on the export in `hf`."""
    model = HFLM(pretrained="hf", trust_remote_code=True, device="cpu", batch_size=3, **options)
    tasks = lm_eval.tasks.TaskManager(include_path="tasks", include_defaults=False)
    return lm_eval.simple_evaluate(model, tasks=[task], task_manager=tasks, bootstrap_iters=0)


def windows(kind: Kind, rest: int) -> str:
    """A text of one document whose last window has `rest` tokens, without "\\r", which does not stay in a corpus."""
    text, encode = "\n".join(LINES[:6]).replace("\r", ""), TRAINED[kind].encode
    return next(text[:end] for end in range(len(text), 0, -1) if len(encode(text[:end])) % CONTEXT == rest % CONTEXT)


@pytest.mark.parametrize("rest", [CONTEXT, 1, CONTEXT - 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_perplexity_of_a_text_is_that_of_lmtrain_eval(
    lmtrain: Lmtrain, tmp_path: Path, kind: Kind, rest: int
) -> None:
    text = windows(kind, rest)
    run_dir = stored_run(tmp_path / "run", TRAINED[kind], copy=True)
    export(run_dir, tmp_path / "hf", None, "auto")
    Path("own.txt").write_text(text)
    Path("own_text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    found = results("own_text", add_bos_token=False)["results"]["own_text"]["word_perplexity,none"]
    words = len(text.split()) + text.count("\n")
    limit = len(TRAINED[kind].encode(text))  # without the `<eos>` after the document
    where = ["--run", run_dir, "--text", "own.txt"]
    how = [f"eval.stride={CONTEXT}", "--limit", str(limit), "--precision", "fp32"]
    expected = lmtrain("eval", *where, *how, "--json").json
    assert math.log(found) * words == pytest.approx(expected["nats"], rel=1e-6)


@torch.no_grad()
def log_prob(model: LanguageModel, before: list[int], following: list[int]) -> float:
    ids: Tensor = torch.tensor([[*before, *following]])[:, -CONTEXT - 1 :]
    log_probs = model.predict(ids[:, :-1]).gather(-1, ids[:, 1:, None])
    return float(log_probs[0, -len(following) :].sum())


def test_the_choices_have_the_probabilities_of_lmtrain(tmp_path: Path) -> None:
    words = TRAINED["word"]
    run_dir = stored_run(tmp_path / "run")
    export(run_dir, tmp_path / "hf", None, "auto")
    ours = build_trained(trained_weights(run_dir, None, "auto"), CPU)
    found = results("choices")
    correct = 0
    for sample, row in zip(found["samples"]["choices"], CHOICES, strict=True):
        question = [words.eos_id, *words.encode(str(row["question"]))]
        choices: Any = row["choices"]
        expected = [log_prob(ours, question, words.encode(choice)) for choice in choices]
        assert [value for value, _ in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
        correct += expected.index(max(expected)) == row["answer"]
    assert found["results"]["choices"]["acc,none"] == correct / 2
