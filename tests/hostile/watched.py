"""A program that reads every kind of file of lmtrain, and generates, under an audit hook.

Prints as JSON the events of unpickling, running code from text, sockets and other programs that Python reported
meanwhile, and those that it reports when they are caused on purpose. Everything is read once before the hook is set,
because lazy imports run code too.
"""

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
from lmtrain.storage import checkpoint, run_checkpoints, run_folder
from lmtrain.training.state import new_training, restore
from tests.hostile.folders import trained_run

WATCHED = ("pickle.", "exec", "compile", "socket.", "subprocess.", "os.system", "os.exec", "os.spawn", "os.posix_spawn")

reported: list[str] = []


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    """Record a watched event, unless the import system caused it."""
    if event.startswith(WATCHED):
        caller = sys._getframe(1).f_code
        if not caller.co_filename.startswith("<frozen importlib"):
            reported.append(f"{event} from {caller.co_filename}:{caller.co_name}")


def read_all(run: Path, config_file: Path) -> None:
    """Read a configuration, a corpus, a token store, a tokenizer and a checkpoint; resume and generate."""
    config = load(config_file, environment={})
    corpus = download(config.data)
    store = tokenize([corpus], config.tokenizer, config.data.dir, note=lambda _: None, progress=False)
    restore(new_training(config, store, lambda _: None), checkpoint.load(run_checkpoints.choose(run, "last")))
    trained = load_trained(run_folder.find_run(None, run.parent), "best", "auto", torch.device("cpu"))
    complete(trained.model, trained.tokenizer, ["the"], Options(max_tokens=3, beams=2))


def main() -> None:
    torch.set_num_threads(1)
    run, _, _ = trained_run(Path(sys.argv[1]))
    read_all(run, run / run_folder.CONFIG)
    sys.addaudithook(hook)
    read_all(run, run / run_folder.CONFIG)
    found = list(reported)
    ForkingPickler.loads(ForkingPickler.dumps(Path("x")))
    exec("pass")
    socket.socket().close()
    control = sorted({event.split(" ")[0] for event in reported[len(found) :]})
    print(json.dumps({"seen": found, "control": control}))


if __name__ == "__main__":
    main()
