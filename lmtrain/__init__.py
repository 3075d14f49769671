"""lmtrain: end-to-end language-model training, from a corpus to text out of a trained model."""

__version__ = "0.1.0"
