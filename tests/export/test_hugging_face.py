"""The exported folder: its tokenizer and its card are those of the run; what can't be exported or replaced."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from lmtrain.config.loader import load
from lmtrain.data.tokenizer_file import Kind
from lmtrain.errors import LmtrainError
from lmtrain.evaluation.perplexity import Score
from lmtrain.export.hugging_face import export
from lmtrain.export.model_card import model_card
from lmtrain.model.trained import trained_weights
from lmtrain.storage import run_folder
from tests.data.helpers import KINDS, LINES, TRAINED
from tests.data.published import SHAPES, as_given, published, tokenizer_of
from tests.export.runs import CONTEXT, stored_run
from tests.helpers import Lmtrain, contents

FILES = {"README.md", "manifest.json", "model.safetensors", "modeling_lmtrain.py"}
FILES |= {f"{name}.json" for name in ("config", "generation_config", "tokenizer", "tokenizer_config")}
TEXTS = ["", "the cat", "\n", "\n\n the  cat \n\n\n", "  sat on\tthe mat\n", "".join(f"{line}\n" for line in LINES)]


def test_new_words_that_are_decoded_by_themselves_have_no_space_before_them(tmp_path: Path) -> None:
    """As transformers' pipeline does, which then joins them to the prompt."""
    export(stored_run(tmp_path / "run", TRAINED["word"]), tmp_path / "hf", None, "auto")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    ids = theirs.encode("the cat sat", add_special_tokens=False)
    assert [theirs.decode(part) for part in (ids, ids[:1], ids[1:])] == ["the cat sat", "the", "cat sat"]


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_tokenizer(tmp_path: Path, kind: Kind) -> None:
    ours = TRAINED[kind]
    export(stored_run(tmp_path / "run", ours), tmp_path / "hf", None, "auto")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    start = [ours.eos_id] if kind == "word" else []
    for text in TEXTS:
        assert theirs(text)["input_ids"] == [*start, *ours.encode(text)]
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert len(theirs) == ours.vocab_size
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (ours.eos_id,) * 3
    assert theirs.unk_token_id == ours.unk_id
    batch = theirs(["the cat sat", "the"], padding=True)
    assert batch["attention_mask"][1][0] == 0
    assert batch["input_ids"][1][-1] == ours.encode("the")[-1]
    assert theirs.model_max_length == CONTEXT


@pytest.mark.parametrize("name", SHAPES)
def test_a_published_tokenizer_encodes_a_line_as_before(tmp_path: Path, name: str) -> None:
    ours = as_given(name)
    export(stored_run(tmp_path / "run", ours), tmp_path / "hf", None, "auto")
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    for text in ("", "the cat", "\n", "  sat on\tthe mat\n"):
        assert theirs.encode(text, add_special_tokens=False).ids == ours.encode(text)


def test_special_tokens_that_are_not_printable_keep_their_ids(tmp_path: Path) -> None:
    """Messages escape them."""
    eos, unk = "<e\N{ZERO WIDTH SPACE}os>", "<u\N{ZERO WIDTH SPACE}nk>"
    ours = tokenizer_of(tmp_path, published("words").replace("[EOS]", eos).replace("[UNK]", unk), eos)
    export(stored_run(tmp_path / "run", ours), tmp_path / "hf", None, "auto")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert ours.unk_id is not None
    assert (theirs.eos_token, theirs.eos_token_id) == (eos, 2)
    assert (theirs.unk_token, theirs.unk_token_id, len(theirs)) == (unk, ours.unk_id, ours.vocab_size)


def test_the_files_are_the_run(tmp_path: Path) -> None:
    run_dir = stored_run(tmp_path / "run", copy=True)
    found = export(run_dir, tmp_path / "hf", None, "auto")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == FILES
    tensors = load_file(tmp_path / "hf/model.safetensors")
    assert tensors.keys() == {f"model.{name}" for name in found.tensors}
    for name, stored in trained_weights(run_dir, None, "auto").tensors.items():
        assert tensors[f"model.{name}"].dtype == torch.float32
        assert torch.equal(tensors[f"model.{name}"], stored[...])
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["model"] == found.config.model.model_dump(mode="json")
    assert (config["vocab_size"], config["max_position_embeddings"]) == (TRAINED["word"].vocab_size, CONTEXT)
    generation = json.loads((tmp_path / "hf/generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["suppress_tokens"]) == (1, [0])


def test_the_command_writes_a_card_with_the_figures_of_the_run(lmtrain: Lmtrain, workdir: Path) -> None:
    result = lmtrain("export", "sample", "out", "--json").json
    state = json.loads((workdir / "runs/sample/state.json").read_text())
    assert result == {"folder": "out", "run": "runs/sample", "step": state["best_step"], "weights": "ema"}
    card = (workdir / "out/README.md").read_text()
    rows = dict(line.strip("| ").split(" | ", 1) for line in card.splitlines() if re.match(r"\| \w", line))
    assert rows["data"] == "sample"
    assert rows["checkpoint"] == f"step {state['best_step']}, EMA weights"
    assert rows["parameters"] == f"{sum(value.numel() for value in load_file('out/model.safetensors').values()):,}"
    valid = state["valid"]
    assert f"word perplexity {valid['word_perplexity']:.3f} over {valid['words']:,.0f} words" in rows["validation"]
    assert rows["validation"].endswith("with context 16 and stride 4")
    assert str(workdir) not in card
    # Weights that were not scored, and a checkpoint that is not the best one.
    assert lmtrain("export", "sample", "raw", "--weights", "raw").code == 0
    raw = (workdir / "raw/README.md").read_text()
    assert "| validation | not measured |" in raw
    assert "| checkpoint | step 12, raw weights |" in raw
    assert lmtrain("export", "sample", "early", "--checkpoint", "10").code == 0
    assert "| validation | not measured |" in (workdir / "early/README.md").read_text()


def test_a_card_is_not_changed_by_what_a_run_says(tmp_path: Path) -> None:
    found = trained_weights(stored_run(tmp_path / "run"), None, "auto")
    card = model_card(replace(found, config=load(found.config, ["data.subset=a|b\n\n## Use\n<b>"], {})), "hf")
    assert r"| data | sample, a\|b\n\n## Use\n&lt;b> |" in card
    assert card.count("\n## Use\n") == 1


def test_only_a_new_folder_is_written_to(lmtrain: Lmtrain, tmp_path: Path) -> None:
    run_dir, folder = stored_run(tmp_path / "run"), tmp_path / "hf"
    assert lmtrain("export", run_dir, folder).out == f"{folder}: {run_dir} step 7 (raw weights)\n"
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    for path in (folder, run_dir, tmp_path / "file"):
        done = lmtrain("export", run_dir, path)
        assert (done.code, done.out) == (1, "")
    assert "hf exists: remove it, or name another folder" in lmtrain("export", run_dir, folder).err
    assert contents(tmp_path) == before


def test_what_cannot_be_exported_is_rejected(lmtrain: Lmtrain, tmp_path: Path) -> None:
    windowed = stored_run(tmp_path / "windowed", mode="windowed")
    with pytest.raises(LmtrainError, match="windowed model, which predicts one token per window"):
        export(windowed, tmp_path / "hf", None, "auto")
    done = lmtrain("export", tmp_path / "none", tmp_path / "hf")
    assert (done.code, "there is no run" in done.err) == (1, True)
    assert lmtrain("export", windowed).code == 2
    done = lmtrain("export", windowed, tmp_path / "hf", "model.dim=3")
    assert (done.code, "'model.dim=3': export accepts only its options (-h) and run.dir=VALUE" in done.err) == (2, True)
    assert not (tmp_path / "hf").exists()


def test_the_dropout_of_a_tokenizer_is_not_exported(tmp_path: Path) -> None:
    document = json.loads(published("gpt2"))
    document["model"]["dropout"] = 0.5
    ours, text = tokenizer_of(tmp_path, document), "the cat sat on the mat and the dog"
    export(stored_run(tmp_path / "run", ours), tmp_path / "hf", None, "auto")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert all(theirs(text)["input_ids"] == ours.encode(text) for _ in range(9))


def test_the_tokenizer_cuts_only_when_asked_and_keeps_the_end(tmp_path: Path) -> None:
    ours, text = as_given("gpt2"), "the cat sat on the mat and the dog"
    export(stored_run(tmp_path / "a", ours), tmp_path / "gpt2", None, "auto")
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "gpt2/tokenizer.json"))
    assert plain.encode(text).ids == ours.encode(text)
    assert plain.encode(text, text).ids == 2 * ours.encode(text)
    export(stored_run(tmp_path / "b"), tmp_path / "hf", None, "auto")
    theirs, words = PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf"), TRAINED["word"]
    cut = theirs("the cat sat on the mat", truncation=True, max_length=3)["input_ids"]
    assert cut == [words.eos_id, *words.encode("the mat")]
    assert theirs("the cat", "sat")["input_ids"] == [words.eos_id, *words.encode("the cat"), *words.encode("sat")]


def test_a_card_does_not_show_where_data_is(tmp_path: Path) -> None:
    found = trained_weights(stored_run(tmp_path / "run"), None, "auto")
    card = model_card(replace(found, config=load(found.config, ["data.source=/home/me/book.txt"], {})), "hf")
    assert "/home/me" not in card
    assert "| data | book.txt |" in card


def test_the_card_and_the_configuration_have_the_values_of_the_run(tmp_path: Path) -> None:
    run_dir = stored_run(tmp_path / "run", layers=3)
    export(run_dir, tmp_path / "hf", None, "auto")
    found = trained_weights(run_dir, None, "auto")
    values = ["data.source=own/parts", "data.subset=lines"]
    card = model_card(replace(found, config=load(found.config, values, {})), "hf")
    assert "| data | own/parts, lines |" in card
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]) == (8, 3, 2)


def test_a_card_has_the_score_of_the_best_checkpoint_and_of_no_other(tmp_path: Path) -> None:
    run_dir = stored_run(tmp_path / "run")  # whose checkpoint is of step 7
    score = Score(nats=20.0, tokens=10, words=10.0, bytes=50.0, context=12, stride=3).summary()
    for step, best_step in ((9, 7), (7, 5)):
        run_folder.write_state(run_dir, "finished", step=step, minutes=1.0, best_step=best_step, valid=score)
        card = model_card(trained_weights(run_dir, None, "auto"), "hf")
        assert ("| validation | not measured |" in card) == (best_step != 7)
