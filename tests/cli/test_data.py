"""`lmtrain download` and `lmtrain tokenize`."""

from pathlib import Path

from tests.helpers import Lmtrain


def test_download_and_tokenize_report_what_they_make_and_make_it_once(lmtrain: Lmtrain, folder: Path) -> None:
    (folder / "corpus").mkdir()
    (folder / "corpus/train.txt").write_text("a b c\nb c d\n")
    (folder / "corpus/valid.txt").write_text("a z\n")
    done = lmtrain("download", "corpus", "--json")
    assert done.json["splits"]["train"]["words"] == 6
    result = lmtrain("tokenize", "corpus", "tokenizer.kind=word", "--json").json
    assert result["vocab_size"] == 6
    assert result["splits"]["train"]["tokens"] == 8
    again = lmtrain("tokenize", "corpus", "tokenizer.kind=word")
    assert "training a" not in again.err
    assert "training a bpe tokenizer of up to 512 entries" in lmtrain("tokenize", "corpus").err
    assert "making corpus" not in lmtrain("download", "corpus").err
    (folder / "corpus/test.txt").write_text("c\n")
    for command in ("download", "tokenize"):
        assert lmtrain(command, "corpus", "--quiet").err == ""


def test_a_configuration_and_overrides_say_what_to_do(lmtrain: Lmtrain, folder: Path) -> None:
    (folder / "own.txt").write_text("a b c\n" * 100)
    (folder / "c.yaml").write_text("data: {source: own.txt, dir: there}\ntokenizer: {kind: bpe, vocab_size: 258}")
    assert lmtrain("download", "-c", "c.yaml", "--json").json["folder"].startswith("there/own-")
    for arguments in (["-c", "c.yaml"], ["own.txt", "-c", "c.yaml", "tokenizer.vocab_size=257"]):
        result = lmtrain("tokenize", *arguments, "--json").json
        assert (result["kind"], result["vocab_size"]) == ("bpe", 258 if len(arguments) == 2 else 257)
    assert lmtrain("tokenize", "data.source=own.txt", "tokenizer.kind=byte", "--json").json["kind"] == "byte"


def test_texts_are_taken_literally(lmtrain: Lmtrain, folder: Path) -> None:
    """For example the name of a column of digits only, and a path that is not valid YAML."""
    text = folder / "a: b #1 [é].txt"
    text.write_text("a b c\n" * 100)
    done = lmtrain("download", text.name, "data.text_column=1234567", "data.dir=0x10")
    assert (done.code, done.err.count("lmtrain: data.")) == (0, 0)
    assert lmtrain("tokenize", text.name, "data.dir=0x10", "tokenizer.kind=bpe", "tokenizer.vocab_size=260").code == 0
    assert len(list((folder / "0x10").iterdir())) == 2
