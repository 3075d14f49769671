"""The language model built from a configuration, and a trained one read back."""
