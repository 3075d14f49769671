"""A small encoder-decoder, and texts of different lengths for it."""

import torch

from lmtrain.nn.alignment import LocationAwareAttention, MonotonicAttention
from lmtrain.nn.cross_attention import CrossAttention
from lmtrain.nn.encoder_decoder import EncoderDecoderConfig
from lmtrain.nn.seq2seq import Seq2Seq

KINDS = (CrossAttention, MonotonicAttention, LocationAwareAttention)
CONFIG = EncoderDecoderConfig(source_vocab=5, target_vocab=7, dim=16, heads=2, ff_dim=24, max_length=9)
END, BEGIN = 5, 6
SOURCE = torch.tensor([[0, 1, 2, 3, 4, 0], [4, 4, 3, 0, 0, 0], [2, 0, 0, 0, 0, 0]])
LENGTHS = (6, 3, 1)
VALID = torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(-1)
TARGET = torch.tensor([[1, 2, 3, 0], [4, 0, 1, 1], [3, 3, 2, 2]])
TARGET_LENGTHS = (4, 1, 2)
INPUTS = torch.tensor([[BEGIN, 1, 2, 3, 4, 0, 2], [BEGIN, 0, 0, 4, 1, END, 3], [BEGIN, 3, 3, 3, BEGIN, 2, 1]])


def make(config: EncoderDecoderConfig = CONFIG, seed: int = 0) -> Seq2Seq:
    """Scores of an aligned attention are large enough for some of the keys to be chosen."""
    torch.manual_seed(seed)
    model = Seq2Seq(config).eval()
    for block in model.decoder.blocks:
        block.cross_attention.query.weight.data.mul_(1 if config.cross_attention is CrossAttention else 6)
    return model
