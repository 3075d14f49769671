"""A trained run in Python. `lmtrain eval` and `lmtrain generate` call the same methods."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from tqdm import tqdm

from lmtrain.config.loader import load as load_config
from lmtrain.config.loader import load_fields
from lmtrain.config.schema import Config
from lmtrain.data.local import read_lines, text_lines
from lmtrain.data.tokenizer import Tokenizer
from lmtrain.data.tokenizing import text_split
from lmtrain.data.tokens import Split, TokenStore
from lmtrain.errors import LmtrainError, UsageError
from lmtrain.evaluation.adaptive import RMS_TOKENS, ContinuousCache, Scorer, adaptable, dynamic_scorer, gradient_rms
from lmtrain.evaluation.perplexity import Score, evaluate
from lmtrain.evaluation.run_store import check_same_corpus, find_run_store
from lmtrain.generation.complete import PromptCompletions, complete
from lmtrain.generation.options import Options, options_with
from lmtrain.generation.sampling import OnToken
from lmtrain.model.ensemble import Predictor, mean_score
from lmtrain.model.packing import pack_for_decoding
from lmtrain.model.trained import TrainedWeights, build_predictor, load_weights
from lmtrain.storage.run_folder import find_run
from lmtrain.system.device import autocast, choose_device, choose_precision
from lmtrain.system.messages import shows_bars


@dataclass(frozen=True, repr=False)
class Run:
    """A trained run at one of its checkpoints, or an ensemble of several; see `load`.

    `config` is what the run, or the first of several, was trained with. Its sections `eval` and `data` may be replaced
    (`dataclasses.replace`), and `evaluate` uses the new ones.
    """

    members: tuple[TrainedWeights, ...]
    config: Config
    device: torch.device
    precision: str | None

    def __repr__(self) -> str:
        return f"Run({' + '.join(str(one.run_dir) for one in self.members)}, step {self.step:,})"

    @property
    def folder(self) -> Path:
        """The folder of the run, or of the first of several."""
        return self.members[0].run_dir

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run."""
        return self.members[0].tokenizer

    @property
    def step(self) -> int:
        """The step of the checkpoint; for an ensemble, the first member's."""
        return int(self.members[0].info["step"])

    def about(self) -> dict[str, Any]:
        """Return the run's folder, step and weights (`ema` or `raw`); for an ensemble, a list of them as `members`."""
        members = [{"run": str(one.run_dir), "step": one.info["step"], "weights": one.weights} for one in self.members]
        return members[0] if len(members) == 1 else {"members": members}

    @functools.cached_property
    def model(self) -> Predictor:
        """The model, a torch module in evaluation mode, with float32 weights."""
        return build_predictor(self.members, self.device)

    @functools.cached_property
    def _packed_model(self) -> Predictor:
        """The model with packed weights, which only generates."""
        model = build_predictor(self.members, self.device)
        pack_for_decoding(model, choose_precision(self.precision or "auto", self.device))
        return model

    # Texts

    @overload
    def generate(self, prompts: str, **options: Any) -> str: ...

    @overload
    def generate(self, prompts: Sequence[str], **options: Any) -> list[str]: ...

    def generate(self, prompts: str | Sequence[str], **options: Any) -> str | list[str]:
        """Return the text that follows a prompt, or a list of the texts that follow several prompts.

        `options` are fields of `generation.options.Options`. By default a text of 100 tokens is sampled at temperature
        0.8 and top-p 0.95, another one each time unless `seed` is given; `temperature=0` is greedy, and `beams=4` is a
        beam search. If an option asks for several texts, the best is returned; `complete` returns all of them, with
        their log-probabilities.
        Raises ValueError for invalid options.
        """
        if isinstance(prompts, str):
            return self.generate([prompts], **options)[0]
        return [result.completions[0].text for result in self.complete(prompts, options_with(**options))]

    def complete(
        self, prompts: Sequence[str], options: Options, *, first: int = 0, on_token: OnToken | None = None
    ) -> list[PromptCompletions]:
        """Return the completions of each prompt, best first: see `generation.complete.complete`."""
        is_list = isinstance(prompts, Sequence) and not isinstance(prompts, str)
        if not is_list or not all(isinstance(prompt, str) for prompt in prompts):
            raise TypeError("prompts must be a list of strings")
        # Inference mode makes every operator a little cheaper to call. A GPU replays its steps, and would gain nothing.
        with torch.inference_mode(self.device.type == "cpu"), autocast(self.device, "fp32"):
            return complete(self._packed_model, self.tokenizer, prompts, options, first=first, on_token=on_token)

    # Scores

    def score(self, text: str | Path, **settings: Any) -> Score:
        """Score a text, or the file at a Path, as `lmtrain eval --text` does.

        The text is scored as a document: the end of its last line is added if it is missing, and except with a word
        tokenizer the end-of-text token counts too. `settings` are those of `evaluate`, and `store` of `score_split`.
        Raises LmtrainError for a text without words.
        """
        return self.score_split(self._split_of(text), **settings)

    def score_tokens(self, text: str | Path, **settings: Any) -> list[tuple[str, float]]:
        """Return the tokens of a text in readable form, each with its nats; the nats add up to those of `score`."""
        split, nats = self._split_of(text), list[float]()
        self.score_split(split, on_nats=lambda batch: nats.extend(batch.flatten().tolist()), **settings)
        return [(self.tokenizer.token(int(index)), value) for index, value in zip(split.ids, nats, strict=False)]

    def evaluate(
        self,
        split: str = "valid",
        *,
        source: str | Path | None = None,
        data_dir: str | Path | None = None,
        **settings: Any,
    ) -> Score:
        """Score a split of the corpus that the run was trained on.

        `settings` are `limit` (score only this many tokens, the first), `cache` and `dynamic` (adapt to the text
        already scored), and fields of the section `eval`, such as `stride`. `source` and `data_dir` are those of
        `token_store`. Raises LmtrainError if there is no such split or store.
        """
        store = self.token_store(source, data_dir)
        return self.score_split(store.split(split), store=store, **settings)

    def token_store(self, source: str | Path | None = None, data_dir: str | Path | None = None) -> TokenStore:
        """Return the token store that the run was trained on, from `data_dir` or from the data folder of the run.

        A missing store is made again if `source` is given, or if lmtrain knows the corpus by name; see
        `find_run_store`.
        """
        places = {"source": source, "dir": data_dir}
        config = self._config_with("data", {name: place for name, place in places.items() if place is not None})
        check_same_corpus(self.members)
        return find_run_store(self.members[0], config.data, may_make=source is not None)

    @torch.inference_mode(False)  # dynamic evaluation computes gradients even if the caller has disabled them
    def score_split(
        self,
        part: Split,
        *,
        store: TokenStore | None = None,
        limit: int | None = None,
        cache: bool = False,
        dynamic: bool = False,
        on_nats: Callable[[Tensor], object] = lambda _nats: None,
        **settings: Any,
    ) -> Score:
        """Score a split batch by batch; `on_nats` is called with the nats of each batch's targets.

        Dynamic evaluation also reads the training split of `store`, by default of `token_store()`.
        Raises UsageError for invalid settings, LmtrainError if dynamic evaluation diverges, and what `adaptable`
        raises.
        """
        most: object = limit  # from Python it may have any type
        if most is not None and (not isinstance(most, Integral) or most < 1):
            raise UsageError(f"limit={most!r} must be a whole number, at least 1")
        config = self._config_with("eval", settings | ({"batch_size": 1} if dynamic else {}))
        own = functools.partial(self.model.score, temperature=config.eval.temperature)
        scorer: Scorer = self._dynamic(config, store) if dynamic else own
        if cache:
            scorer = ContinuousCache(scorer, config.eval)

        def forward(inputs: Tensor, targets: Tensor) -> Tensor:
            nats, _ = scorer(inputs, targets)
            on_nats(nats)
            return nats

        with self._bar(None, len(part.ids[:limit])) as bar:
            score = evaluate(
                forward,
                part,
                config,
                stride=config.stride,
                first_token=self.tokenizer.eos_id,
                device=self.device,
                precision=self.score_precision,
                limit=limit,
                advance=bar.update,
            )
        if not math.isfinite(score.nats):
            raise LmtrainError(
                "dynamic evaluation diverged: lower eval.dynamic_rate"
                if dynamic
                else "the score is not finite: use another checkpoint, or fp32"
            )
        return score

    @property
    def score_precision(self) -> str:
        """The precision of scores: `precision`, or else `train.precision` of the run."""
        return choose_precision(self.precision or self.config.train.precision, self.device)

    def _config_with(self, section: str, fields: Mapping[str, Any]) -> Config:
        """Return the run's configuration with these fields in a section. Raises UsageError for an invalid one."""
        sections = self.config.model_dump(mode="json")
        sections[section] |= fields
        return load_config(sections, environment={})

    def _dynamic(self, config: Config, store: TokenStore | None) -> Scorer:
        members, precision = adaptable(self.model, self.score_precision), self.score_precision
        train = (store or self.token_store()).split("train")
        with self._bar("gradients", len(members) * min(RMS_TOKENS, train.tokens)) as bar:
            rms = [gradient_rms(each, train, precision=precision, advance=bar.update) for each in members]
        own = [dynamic_scorer(*each, config.eval, config.stride) for each in zip(members, rms, strict=True)]
        return (
            own[0] if len(own) == 1 else lambda inputs, targets: mean_score([score(inputs, targets) for score in own])
        )

    def _split_of(self, text: str | Path) -> Split:
        """Return the split that a text, or the file at a Path, would be in a corpus."""
        if isinstance(text, Path):
            return text_split(read_lines([text], self.config.data.text_column), self.tokenizer, label=str(text))
        if not isinstance(text, str):
            raise TypeError(f"the text must be a str or a Path, not {type(text).__name__}")
        return text_split(text_lines(text), self.tokenizer, label="the text")

    def _bar(self, title: str | None, tokens: int) -> "tqdm[NoReturn]":
        return tqdm(desc=title, total=tokens, unit="tok", unit_scale=True, disable=not shows_bars(), delay=0.5)


def load(
    run: str | Path | Sequence[str | Path] | None = None,
    *,
    checkpoint: str | int | None = None,
    weights: str = "auto",
    device: str = "auto",
    precision: str | None = None,
) -> Run:
    """Load a trained run.

    - `run`: its folder, or its name in `runs/`; None: the latest there; a list: an ensemble, which predicts the mean of
      the runs' probabilities.
    - `checkpoint`: `best`, `last` or a step; None: the best undamaged one.
    - `weights`: `ema`, `raw`, or `auto` (EMA weights if the checkpoint has them).
    - `device`: `cpu`, `cuda`, or `auto` (CUDA if available).
    - `precision`: `fp32`, `bf16`, `fp16` or `auto` (the fastest); None: `train.precision` for scores, else `auto`.

    LMTRAIN_RUN__DIR in the environment replaces the folder `runs`, and LMTRAIN_DATA__DIR the data folder `data`.
    Messages and progress go to stderr. Raises LmtrainError if a run does not exist or is damaged, or if several can't
    be averaged, and UsageError for an invalid argument or variable.
    """
    for name, value, choices in (
        ("weights", weights, ("auto", "raw", "ema")),
        ("device", device, ("auto", "cpu", "cuda")),
        ("precision", precision, (None, "auto", "fp32", "bf16", "fp16")),
    ):
        if value not in choices:
            raise UsageError(f"{name}={value!r}: choose one of {', '.join(map(str, choices))}")
    names = [run] if run is None or isinstance(run, str | Path) else run
    if not names:
        raise UsageError("the list of runs is empty: name one, or leave it out for the latest")
    settings = load_fields(None, (), "run.dir", "data.dir")
    folders = [find_run(None if name is None else Path(name), settings.run.dir) for name in names]
    which = None if checkpoint is None else str(checkpoint)
    members = load_weights(folders, which, weights)
    # The data folder in the run's configuration may be one of another machine.
    config = members[0].config.with_fields(data={"dir": settings.data.dir})
    return Run(members, config, choose_device(device), precision)
