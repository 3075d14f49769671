"""The monitor: what it leaves in metrics.jsonl and in TensorBoard (by TensorBoard's own reader), and on stderr."""

import fcntl
import html
import io
import json
import math
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lmtrain.errors import LmtrainError
from lmtrain.generation.picture import heatmap
from lmtrain.training.monitor import Monitor


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def monitor(run_dir: Path, **changes: Any) -> Monitor:
    arguments: dict[str, Any] = {
        "step": 0,
        "progress": 0.0,
        "total_steps": 10,
        "metrics_bytes": 0,
        "hyperparameters": {"train.lr": 0.001, "model.norm": "rms", "train.ema": None, "model.qk_norm": True},
        "quiet": False,
    }
    return Monitor(run_dir, **{**arguments, **changes})


def records(run_dir: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def events(run_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert {path.parent for path in run_dir.rglob("events*")} == {run_dir / "tensorboard"}  # one run, not two
    accumulator = EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0, "images": 0}
    )
    return accumulator.Reload()


def curve(run_dir: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events(run_dir).Scalars(tag)]


def test_metrics_reach_the_file_and_tensorboard(tmp_path: Path) -> None:
    watch = monitor(tmp_path)
    watch.train(1, {"loss": 2.5, "lr": 0.125})
    watch.evaluation(1, {"perplexity": 8.0})
    watch.train(2, {"loss": math.nan, "lr": math.inf})
    watch.advance(2, 0.2)
    watch.close({"perplexity": 7.0})
    assert records(tmp_path) == [
        {"step": 1, "kind": "train", "loss": 2.5, "lr": 0.125},
        {"step": 1, "kind": "valid", "perplexity": 8.0},
        {"step": 2, "kind": "train", "loss": None, "lr": None},
        {"step": 2, "kind": "final", "perplexity": 7.0},
    ]
    assert curve(tmp_path, "train/lr") == [(1, 0.125), (2, math.inf)]
    assert curve(tmp_path, "valid/perplexity") == [(1, 8.0)]
    assert curve(tmp_path, "final/perplexity") == [(3, 7.0)]


def test_a_resumed_run_leaves_one_curve(tmp_path: Path) -> None:
    """Points after the checkpoint are written anew, with other values: neither lost nor there twice."""
    watch = monitor(tmp_path)
    length = 0
    for step in range(1, 7):
        watch.train(step, {"loss": float(step)})
        if step == 4:
            watch.evaluation(step, {"loss": 40.0})
            length = watch.metrics_bytes()
    watch.close(None)
    assert length == len("".join((tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)[:5]))

    watch = monitor(tmp_path, step=4, progress=0.4, metrics_bytes=length)
    for step in range(5, 9):
        watch.train(step, {"loss": 10.0 * step})
    watch.close({"loss": 1.0})

    expected = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0), (6, 60.0), (7, 70.0), (8, 80.0)]
    assert curve(tmp_path, "train/loss") == expected
    assert curve(tmp_path, "valid/loss") == [(4, 40.0)]
    assert [(r["step"], r["loss"]) for r in records(tmp_path) if r["kind"] == "train"] == expected
    assert [r["kind"] for r in records(tmp_path)].count("valid") == 1


def test_a_run_begun_again_forgets_the_first_try(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        watch = monitor(tmp_path)
        watch.train(3, {"loss": value})
        watch.close(None)
    assert records(tmp_path) == [{"step": 3, "kind": "train", "loss": 2.0}]
    assert curve(tmp_path, "train/loss") == [(3, 2.0)]


def test_a_shortened_metrics_file_is_cut_at_its_last_whole_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"ste')
    watch = monitor(tmp_path, step=2, metrics_bytes=5000)
    watch.train(3, {"loss": 1.0})
    assert watch.metrics_bytes() == (tmp_path / "metrics.jsonl").stat().st_size
    watch.close(None)
    assert records(tmp_path) == [{"step": 1}, {"step": 3, "kind": "train", "loss": 1.0}]


def test_a_metrics_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(LmtrainError, match=r"metrics\.jsonl"):
        monitor(tmp_path)


def test_hyperparameters_are_the_runs_own(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams import metadata

    watch = monitor(tmp_path)
    watch.flush()
    content = events(tmp_path).PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert start.hparams["train.lr"].number_value == 0.001
    assert start.hparams["model.norm"].string_value == "rms"
    assert start.hparams["train.ema"].string_value == "None"
    assert metadata.SESSION_END_INFO_TAG not in content
    watch.close({"perplexity": 7.0})
    assert metadata.SESSION_END_INFO_TAG in events(tmp_path).PluginTagToContent("hparams")


@pytest.mark.filterwarnings("ignore:html5lib:DeprecationWarning")
def test_text_is_shown_as_it_stands(tmp_path: Path) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    text = "= A <unk> title =\n# not a heading\n1. *x* _y_ @-@ `z` | & &amp; \\ [a](b)\n- <script>é</script>\n===\nend"
    watch = monitor(tmp_path)
    watch.text(5, "sample", text)
    watch.close(None)
    (event,) = events(tmp_path).Tensors("sample/text_summary")
    assert event.step == 5
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
    body = re.fullmatch(r"<p>(.*)</p>", shown, re.DOTALL)
    assert body is not None
    lines = [line.strip() for line in body[1].split("<br>")]
    assert not any(re.search(r"[<>]", line) for line in lines)
    assert [html.unescape(line) for line in lines] == text.splitlines()


def test_weights_become_a_picture(tmp_path: Path) -> None:
    weights = np.array([[0.1, 0.2, 0.7], [1.0, 0.0, 0.0]], dtype=np.float32)
    watch = monitor(tmp_path)
    watch.weights(4, "pool", ["a", "<unk>", "b"], weights)
    watch.close(None)
    (event,) = events(tmp_path).Images("pool")
    picture = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    assert event.step == 4
    assert (event.height, event.width) == picture.shape[:2]
    np.testing.assert_array_equal(picture, heatmap(["a", "<unk>", "b"], weights))


def cell_colours(picture: np.ndarray, heads: int, words: int) -> np.ndarray:
    """The brightness near the corner of each cell, found from the grid lines' own colour: (heads, words)."""
    grid = (picture == 226).all(axis=2)
    rows = np.flatnonzero(grid.sum(axis=1) > 40 * words)[: heads + 1]
    columns = np.flatnonzero(grid[rows[0] : rows[-1]].sum(axis=0) > 30 * heads)[: words + 1]
    return np.array([[int(picture[y + 3, x + 3].sum()) for x in columns[:-1]] for y in rows[:-1]])


def test_the_picture_orders_weights_by_darkness() -> None:
    weights = np.array([[0.0, 0.1, 0.2, 0.7], [0.4, 0.3, 0.25, 0.05]])
    colours = cell_colours(heatmap(["one", "two", "three", "four"], weights), 2, 4)
    order = np.argsort(weights.ravel())
    assert (np.diff(colours.ravel()[order]) < 0).all()


def test_the_picture_has_room_for_long_texts_and_odd_words() -> None:
    words = ["w" * 200, "", "\n", "日本", "\u2013", "café"] + ["word"] * 60
    weights = np.full((3, len(words)), 1 / len(words))
    one_band = heatmap(words[:24], weights[:, :24])
    picture = heatmap(words, weights)
    assert picture.dtype == np.uint8
    assert picture.shape[1] == one_band.shape[1] < 1500
    assert picture.shape[0] > 2 * (one_band.shape[0] - 100)
    border = np.concatenate(
        [picture[:8].ravel(), picture[-8:].ravel(), picture[:, :8].ravel(), picture[:, -8:].ravel()]
    )
    assert (border == 255).all()  # nothing runs over the edge
    with pytest.raises(ValueError, match="words"):
        heatmap(["a"], np.ones((1, 2)))


def test_without_a_terminal_there_are_plain_lines_at_most_every_ten_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    watch = monitor(tmp_path, total_steps=1000, step=100, progress=0.1, clock=clock)
    for step in range(101, 201):
        clock.now += 0.3
        watch.advance(step, step / 1000)
        watch.train(step, {"loss": 2.0, "perplexity": 1234.5, "tokens_per_second": 9876.5, "lr": 1.0})
    watch.evaluation(200, {"word_perplexity": 1234.5, "bits_per_byte": 1.23456})
    watch.note("saved")
    watch.close(None)
    out, err = capsys.readouterr()
    assert out == ""
    assert "\r" not in err
    lines = err.splitlines()
    assert lines[0] == "step 101/1,000 (10%)  loss 2.000  ppl 1,234.5  9,876 tok/s  ETA 04:29"
    assert [line.split()[1] for line in lines[:-2]] == ["101/1,000", "135/1,000", "169/1,000"]
    assert lines[-2:] == ["step 200 valid:  word perplexity 1,234  bits per byte 1.235", "saved"]


def test_quiet_keeps_evaluations_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = monitor(tmp_path, quiet=True)
    watch.train(1, {"loss": 2.0})
    watch.evaluation(1, {"loss": 2.0})
    watch.note("saved")
    watch.close(None)
    assert capsys.readouterr().err.splitlines() == ["step 1 valid:  loss 2", "saved"]


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> Iterator[Callable[[], str]]:
    """A terminal as stderr; gives a function that tells what has appeared on it."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with os.fdopen(slave, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        yield lambda: os.read(master, 1 << 16).decode()
    os.close(master)


def test_on_a_terminal_there_is_a_bar_with_the_share_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(monkeypatch, columns=100) as screen:
        watch = monitor(tmp_path, total_steps=None, step=10, progress=0.25)
        watch.train(12, {"loss": 2.0, "perplexity": 7.4, "tokens_per_second": 5000.0})
        watch.advance(1234, 0.5)
        watch.note("a note")
        watch.close(None)
        seen = screen()
    assert re.search(r"step 10: +25%\|", seen)
    assert re.search(r"step 1,234: +50%\|.*00:00<.*loss 2\.000, ppl 7\.4, 5,000 tok/s", seen)
    assert re.search(r"\r +\ra note\r?\n", seen)  # the bar is wiped before the line


def test_a_terminal_without_a_width_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns=0) as screen:
        watch = monitor(tmp_path)
        watch.train(1, {"loss": 2.0})
        watch.close(None)
        seen = screen()
    assert seen.startswith("step 0/10 (0%)  loss 2.000  ETA ?")
