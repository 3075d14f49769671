"""From text to batches: sources, corpus, tokenizer, token store, sample order."""
