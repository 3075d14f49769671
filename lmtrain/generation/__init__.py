"""Search on token ids (greedy, sampling, beam), and text in and out around it."""
