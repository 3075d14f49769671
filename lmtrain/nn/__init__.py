"""The layers, and the language model made of them."""
