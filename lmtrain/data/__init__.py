"""From text to batches: corpora, the sample corpus, tokenizers, token stores."""
