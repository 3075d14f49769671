"""`python -m lmtrain` is the `lmtrain` command."""

from lmtrain.cli import main

main()
