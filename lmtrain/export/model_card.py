"""The README.md of an exported model, made from its run."""

import math
from pathlib import Path

from lmtrain import __version__
from lmtrain.model.trained import TrainedWeights
from lmtrain.system.messages import escaped
from lmtrain.training.finished import read_outcome

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- lmtrain
---

# {name}

A causal language model: Transformer encoder blocks and an attention-pooling head, trained with lmtrain and
exported by its version {version}. It continues text, and is not tuned to follow instructions.

| | |
| --- | --- |
{rows}

## Use

Install lmtrain and transformers 5: `modeling_lmtrain.py` in this folder imports the model from lmtrain.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

# "{folder}" is the path of this folder.
tokenizer = AutoTokenizer.from_pretrained("{folder}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)
inputs = tokenizer("The", return_tensors="pt")
texts = model.generate(**inputs, max_new_tokens=50, do_sample=True, temperature=0.8, top_p=0.95)
print(tokenizer.decode(texts[0], skip_special_tokens=True))
```

The logits are log-probabilities. A text ends with `{eos}`{before}.
"""


def model_card(trained: TrainedWeights, folder: str) -> str:
    """Return the text of the card in a folder of this name."""
    config, info, tokenizer = trained.config, trained.info, trained.tokenizer
    source = Path(config.data.source).name if Path(config.data.source).is_absolute() else config.data.source
    data = source if config.data.subset is None else f"{source}, {config.data.subset}"
    rows = {
        "data": data,
        "tokenizer": f"{tokenizer.kind}, {tokenizer.vocab_size:,} entries",
        "parameters": f"{sum(math.prod(stored.shape) for stored in trained.tensors.values()):,}",
        "context": f"{config.model.context:,} tokens",
        "checkpoint": f"step {info['step']:,}, {'EMA' if trained.weights == 'ema' else 'raw'} weights",
        "validation": _measured(trained),
    }
    return _CARD.format(
        name=trained.run_dir.name,
        folder=folder,
        version=__version__,
        rows="\n".join(f"| {name} | {_cell(str(value))} |" for name, value in rows.items()),
        eos=tokenizer.token(tokenizer.eos_id),
        before=", which the tokenizer also puts before it" if tokenizer.kind == "word" else "",
    )


def _cell(text: str) -> str:
    """Return a text for a table of Markdown: on one line, and without HTML."""
    return escaped(text).replace("|", r"\|").replace("<", "&lt;")


def _measured(trained: TrainedWeights) -> str:
    """Describe the run's final score, if it is that of these weights."""
    outcome, averages = read_outcome(trained.run_dir), bool(trained.config.train.ema)
    if outcome is None or outcome.best_step != trained.info["step"] or averages != (trained.weights == "ema"):
        return "not measured"
    score = outcome.valid
    return f"{score.headline}, with context {score.context} and stride {score.stride}"
