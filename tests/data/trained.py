"""A trained tokenizer of each kind, and the lines that it was trained on."""

from lmtrain.data.tokenizer import Tokenizer
from tests.data.helpers import CONFIGS, KINDS

LINES = [
    " = Valkyria Chronicles = ",
    "",
    "the cat sat on the mat , and the cat 's <unk> <eos> sat",
    "naïve façade — 東京 the the\ttab\x1cseparated\r",
    "x<eos>y <eos> <eos> <|endoftext|> the cat sat on the mat",
    "the cat sat on the mat and the dog sat on the log",
] * 3
TRAINED = {kind: Tokenizer.train(LINES, CONFIGS[kind]) for kind in KINDS}
