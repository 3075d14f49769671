"""Training from Python. `lmtrain train` also calls `plan_run` and `train_plan`."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmtrain.api.run import Run, load
from lmtrain.config.loader import with_source
from lmtrain.config.schema import Config
from lmtrain.system.distributed import join_processes
from lmtrain.system.messages import log, log_level
from lmtrain.training.finished import Outcome
from lmtrain.training.loop import fit
from lmtrain.training.plan import RunPlan, plan_run, prepare


def train(
    *arguments: str | Path,
    config: str | Path | Mapping[str, Mapping[str, Any]] | Config | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model, or resume an interrupted run, and return the run at its best checkpoint.

    `arguments` are those of the command: a source, unless `config` names it, and overrides `section.field=value`.
    `config` is a YAML file or the name of a recipe, the sections of a configuration as a dict, or a Config; without it,
    sizes and budget follow from the text and the machine. `quiet` shows warnings only.

        lmtrain.train("book.txt", "train.max_minutes=20")
        lmtrain.train("train.max_minutes=20", config="wikitext2-cpu")
        lmtrain.train(config={"data": {"source": "book.txt"}, "model": {"layers": 2}, "train": {"steps": 500}})

    A corpus that is missing is downloaded and tokenized first; a finished run is not trained again. Under torchrun,
    every process calls this. Raises LmtrainError if the command `train` would fail with a message, and
    KeyboardInterrupt after Ctrl-C, once the checkpoint is saved. Call it in the main thread, which gets the signals.
    """
    overrides = with_source([str(argument) for argument in arguments])
    plan = plan_run(Path(config) if isinstance(config, str) else config, overrides)
    with log_level(logging.WARNING if quiet else log.level):
        train_plan(plan)
    return load(plan.run_dir, device=plan.config.train.device)


@torch.inference_mode(False)
def train_plan(plan: RunPlan) -> Outcome:
    """Train to the end of the budget, and return the outcome. Every process of the run calls this.

    It computes gradients even if the caller has disabled them. Torch's CPU generator and number of threads are
    restored: a search that draws its settings from the generator would otherwise draw the same ones after each run.
    """
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]), join_processes(plan.config.train.device) as processes:
            with processes.main_first():
                config, store = prepare(plan)
            return fit(config, store, plan.run_dir, processes=processes)
    finally:
        torch.set_num_threads(threads)
