"""Text from prompts: what the model reads, what it may say, where a text ends, and how it is written."""
