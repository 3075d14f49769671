"""The monitor: the contents of metrics.jsonl and of TensorBoard (read by TensorBoard itself), and stderr."""

import html
import logging
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.config.schema import Config
from lmtrain.data.tokens import TokenStore
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.system.messages import log, log_level
from lmtrain.training.monitor import CHARTS, Monitor, RunMonitor, escape_markdown, table
from lmtrain.training.validation import POOL_TOKENS, evaluating, show_samples
from tests.helpers import terminal
from tests.training.helpers import change, events, metrics, start


def monitor(run_dir: Path, **changes: Any) -> RunMonitor:
    arguments = {"step": 0, "progress": 0.0, "total_steps": 10, "metrics_bytes": 0}
    return RunMonitor(run_dir, **arguments | changes)


def curve(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run_dir).Scalars(tag)]


def html_of(run_dir: Path, markdown: str) -> str:
    """What TensorBoard shows of a text of step 4."""
    from tensorboard.plugin_util import markdown_to_safe_html

    reports = monitor(run_dir)
    reports.text(4, "sample", markdown)
    reports.close()
    (event,) = events(run_dir).Tensors("sample/text_summary")
    assert event.step == 4
    page: str = markdown_to_safe_html(event.tensor_proto.string_val[0])
    return page


def test_metrics_are_written_to_the_file_and_charted(tmp_path: Path) -> None:
    reports = monitor(tmp_path)
    reports.record(1, "train", {"loss": 2.5, "lr": 0.125, "minutes": 1.0})
    reports.record(1, "valid", {"loss": 2.0, "word_perplexity": 8.0})
    reports.record(2, "valid", {"loss": 1.0, "word_perplexity": 4.0, "bits_per_byte": 1.5})
    reports.record(2, "train", {"loss": math.nan, "lr": math.inf})
    reports.record(2, "final", {"word_perplexity": 7.0})
    reports.close()
    assert metrics(tmp_path) == [
        {"step": 1, "kind": "train", "loss": 2.5, "lr": 0.125, "minutes": 1.0},
        {"step": 1, "kind": "valid", "loss": 2.0, "word_perplexity": 8.0},
        {"step": 2, "kind": "valid", "loss": 1.0, "word_perplexity": 4.0, "bits_per_byte": 1.5},
        {"step": 2, "kind": "train", "loss": None, "lr": None},
        {"step": 2, "kind": "final", "word_perplexity": 7.0},
    ]
    shown = events(tmp_path)
    charts = {tag: [(event.step, event.value) for event in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}
    assert sorted(charts)[:2] == ["loss/train", "loss/valid"], "what the page opens on"
    assert math.isnan(charts.pop("loss/train")[1][1])
    assert charts == {
        "loss/valid": [(1, 2.0), (2, 1.0)],
        "optimizer/learning_rate": [(1, 0.125), (2, math.inf)],
        "perplexity/valid": [(1, 8.0), (2, 4.0)],
        "quality/bits_per_byte": [(2, 1.5)],
    }


@pytest.mark.parametrize("step", [0, 4])
def test_a_resumed_run_continues_its_curves(tmp_path: Path, step: int) -> None:
    """Points after the checkpoint are written again, here with other values: neither lost nor duplicated."""
    reports = monitor(tmp_path)
    length = 0
    for number in range(1, 7):
        reports.record(number, "train", {"loss": float(number)})
        if number == step:
            reports.record(number, "valid", {"loss": 40.0})
            length = reports.flush()
    reports.close()

    reports = monitor(tmp_path, step=step, progress=step / 10, metrics_bytes=length)
    for number in range(step + 1, 9):
        reports.record(number, "train", {"loss": 10.0 * number})
    reports.close()

    expected = [(number, number * (10.0 if number > step else 1.0)) for number in range(1, 9)]
    evaluated = [(4, 40.0)] * (step == 4)
    assert curve(tmp_path, "loss/train") == expected
    assert [(r["step"], r["loss"]) for r in metrics(tmp_path) if r["kind"] == "train"] == expected
    assert [(r["step"], r["loss"]) for r in metrics(tmp_path) if r["kind"] == "valid"] == evaluated
    assert not evaluated or curve(tmp_path, "loss/valid") == evaluated


def test_a_truncated_metrics_file_is_cut_at_its_last_complete_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    reports = monitor(tmp_path, step=2, metrics_bytes=5000)
    reports.record(3, "train", {"loss": 1.0})
    assert reports.flush() == (tmp_path / "metrics.jsonl").stat().st_size
    reports.close()
    assert metrics(tmp_path) == [{"step": 1}, {"step": 3, "kind": "train", "loss": 1.0}]


@pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
def test_text_is_shown_literally(tmp_path: Path) -> None:
    text = "= A <unk> title =\n# not a heading\n1. *x* _y_ @-@ `z` | & &amp; \\ [a](b)\n- <script>é</script>\n===\nend"
    body = re.fullmatch(r"<p>(.*)</p>", html_of(tmp_path, escape_markdown(text)), re.DOTALL)
    assert body is not None
    lines = [line.strip() for line in body[1].split("<br>")]
    assert not any(re.search(r"[<>]", line) for line in lines)
    assert [html.unescape(line) for line in lines] == text.splitlines()


@pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
def test_weights_become_a_table(tmp_path: Path) -> None:
    weights = np.array([[0.1, 0.2, 0.7, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=np.float32)
    tokens = ["a", "<unk>", "|", "日本\u2028"]
    page = html_of(tmp_path, table(tokens, weights))
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in page.split("<tr>")[1:]]
    assert [[html.unescape(cell) for cell in row] for row in rows] == [
        ["", "a", "<unk>", "|", "日本\\u2028"],
        ["head 1", "10.0%", "20.0%", "70.0%", "0.0%"],
        ["head 2", "100.0%", "0.0%", "0.0%", "0.0%"],
    ]


def test_without_a_terminal_there_are_plain_lines_at_most_every_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("lmtrain.training.monitor.time", SimpleNamespace(monotonic=lambda: now))
    reports = monitor(tmp_path, total_steps=1000, step=100, progress=0.1)
    for step in range(101, 201):
        now += 0.3 if step > 101 else 30.0
        reports.advance(step, step / 1000)
        perplexity = 1234.5 if step < 150 else 1e300
        reports.record(step, "train", {"loss": 2.0, "perplexity": perplexity, "tokens_per_second": 9876.5, "lr": 1.0})
    log.info("saved")
    reports.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert "\r" not in err
    lines = err.splitlines()
    assert lines == [
        "step 101/1,000 (10%)  loss 2.000  ppl 1,234  9,876 tok/s",  # one step says nothing about the others
        "step 135/1,000 (14%)  loss 2.000  ppl 1,234  9,876 tok/s  ETA 04:19",
        "step 169/1,000 (17%)  loss 2.000  ppl 1.0e+300  9,876 tok/s  ETA 04:09",
        "saved",
    ]


def test_quiet_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with log_level(logging.WARNING):
        reports = monitor(tmp_path)
        reports.record(1, "train", {"loss": 2.0})
        reports.close()
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar_with_the_share_of_the_budget(tmp_path: Path) -> None:
    with terminal(columns=100) as screen:
        reports = monitor(tmp_path, total_steps=None, step=10, progress=0.25)
        reports.record(12, "train", {"loss": 2.0, "perplexity": 7.4, "tokens_per_second": 5000.0})
        reports.advance(1234, 0.5)
        log.info("a note")
        reports.close()
        seen = screen()
    assert re.search(r"step 10: +25%\|", seen)
    assert re.search(r"step 1,234: +50%\|.*00:00<.*loss 2\.000, ppl 7\.4, 5,000 tok/s", seen)
    assert re.search(r"\r +\ra note\r?\n", seen)  # the bar is erased before the line


def test_samples_and_pooling_weights_are_the_same_each_time(tiny: Config, store: TokenStore) -> None:
    """So that a resumed run shows what an uninterrupted one does."""
    shown: list[str] = []

    class Texts(Monitor):
        def text(self, step: int, title: str, markdown: str) -> None:
            shown.append(markdown)

    tiny = change(tiny, train__sample_tokens=10)
    state = start(tiny)
    for _ in range(2):
        torch.rand(7)
        with evaluating(state.model, {}):
            show_samples(state, Texts())
    assert shown[:2] == shown[2:]
    (greedy,) = complete(state.model, store.tokenizer, ["The"], Options(max_tokens=tiny.train.sample_tokens))
    assert not shown[0].endswith(escape_markdown(greedy.completions[0].text))
    ids = store.split("valid").ids[:POOL_TOKENS].tolist()
    weights = state.model.eval().pool_weights(torch.tensor([ids])).numpy()
    assert shown[1] == table([store.tokenizer.token(index) for index in ids], weights)


def test_flushed_metrics_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint counts them, and may be on the disk before them otherwise."""
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink()))
    reports = monitor(tmp_path)
    reports.record(1, "train", {"loss": 2.0})
    reports.flush()
    assert tmp_path / "metrics.jsonl" in synced
    reports.close()


def test_every_chart_has_its_own_metric(tmp_path: Path) -> None:
    reports = monitor(tmp_path)
    for step, (kind, metric) in enumerate(CHARTS):
        reports.record(step, kind, {metric: 10.0 + step})  # type: ignore[arg-type]
    reports.close()
    curves = [curve(tmp_path, tag) for tag in CHARTS.values()]
    assert curves == [[(step, 10.0 + step)] for step in range(len(CHARTS))]
