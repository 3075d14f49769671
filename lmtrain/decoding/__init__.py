"""Search for text: on ids and a step function, with no tokenizer and no I/O."""
