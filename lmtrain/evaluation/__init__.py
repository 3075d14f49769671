"""Perplexity over sliding windows; evaluation with a cache and with dynamic weights."""
