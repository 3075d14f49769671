"""Reads every kind of file that lmtrain keeps, and generates, under an audit hook; run as a program of its own.

Prints as JSON what Python reported meanwhile of unpickling, of code made from text, of sockets and of other programs;
and what it reports when those are done on purpose. All is read once before the hook is set: what is imported lazily is
then there, since an import runs code as well.
"""

import ast
import json
import socket
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch

from lmtrain.config.loader import load
from lmtrain.data.corpus import download
from lmtrain.data.tokenizing import tokenize
from lmtrain.generation.complete import complete
from lmtrain.generation.options import Options
from lmtrain.model.trained import load_trained
from lmtrain.storage import checkpoint
from lmtrain.training.state import prepare, restore
from tests.hostile.folders import trained_run

WATCHED = ("pickle.", "exec", "compile", "socket.", "subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn")

seen: list[str] = []


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Note a watched event, unless the import system caused it, or `ast.parse`: numpy reads the headers of arrays with
    `ast.literal_eval`, which makes a tree and no code."""
    if event.startswith(WATCHED):
        caller = sys._getframe(1).f_code
        if not caller.co_filename.startswith("<frozen importlib") and caller is not ast.parse.__code__:
            seen.append(f"{event} from {caller.co_filename}:{caller.co_name}")


def read_all(run: Path, config_file: Path) -> None:
    """Read a configuration, a corpus, a token store, a tokenizer and a checkpoint, go on from it, and generate."""
    config = load(config_file, environment={})
    corpus = download(config.data)
    store = tokenize([corpus], config.tokenizer, config.data.dir, note=lambda _: None, progress=False)
    restore(prepare(config, store, lambda _: None), checkpoint.load(checkpoint.choose(run, "last")))
    trained = load_trained(checkpoint.find_run(None, run.parent), "best", "auto", torch.device("cpu"))
    complete(trained.model, trained.tokenizer, ["the"], Options(max_tokens=3, beams=2))


def main() -> None:
    torch.set_num_threads(1)
    run, _, _ = trained_run(Path(sys.argv[1]))
    read_all(run, run / checkpoint.CONFIG)
    sys.addaudithook(hook)
    read_all(run, run / checkpoint.CONFIG)
    found = list(seen)
    ForkingPickler.loads(ForkingPickler.dumps(Path("x")))
    exec("pass")
    socket.socket().close()
    control = sorted({event.split(" ")[0] for event in seen[len(found) :]})
    print(json.dumps({"seen": found, "control": control}))


if __name__ == "__main__":
    main()
