"""NLL of a fixed text by model and setting: distance to float32, divergence, top-1 agreement.

The reference is transformers in float32. Each setting runs through the product's engine: its loader, scheduler and runner answer
requests for prompt log-probabilities, one prompt after the other. Rows of transformers run through transformers alone.

`python -m bench quality` runs it. It takes ten minutes on two idle cores, and up to 6 GB of memory (262,144 tokens in Gemma's vocabulary).
"""

import gc
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests.real_models import GEMMA3, convert
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from bench.common.report import make_parser, write_report
from bench.quality.contexts import compare_ways
from bench.quality.engine import score
from bench.quality.plain import load_plain, score_plain
from bench.quality.scores import Distributions, Divergence, Scores
from bench.quality.settings import SETTINGS
from fairlead.packaged_model import SMOLLM2
from fairlead_worker.errors import ModelLoadError

TEXT = Path(__file__).parent / "text.txt"
LONGEST = 1900
"""Most tokens of a prompt."""
MODELS = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
REFERENCE, PLAIN_BFLOAT16 = "transformers, float32", "transformers, bfloat16"
COLUMNS = ("nll", "change", "distance", "divergence", "agreement")
Row = dict[str, Any]


def split(tokens: list[int], longest: int = LONGEST) -> list[list[int]]:
    """Return `tokens` as prompts of about equal length, none longer than `longest`."""
    many = -(-len(tokens) // longest)
    size = -(-len(tokens) // many)
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]


class Model:
    """One model's rows, compared with its reference as they come."""

    def __init__(self, name: str, text: str) -> None:
        self._source = MODELS[name].fetch()
        self._folder = convert(self._source, "float32")
        tokens: list[int] = AutoTokenizer.from_pretrained(self._folder)(text)["input_ids"]
        self._prompts = split(tokens)
        model = load_plain(self._folder, torch.float32)
        self._distributions = Distributions(len(tokens) - len(self._prompts), model.config.vocab_size)
        self._reference = score_plain(model, self._prompts, self._distributions.fill)
        self.tokens = len(tokens)
        self.rows: dict[str, Row] = {}
        self._show(REFERENCE, {"nll": self._reference.nll, "path": "transformers"})

    def add_plain(self) -> None:
        """Add the row of transformers in bfloat16."""
        model = load_plain(self._folder, torch.bfloat16)
        self._add(PLAIN_BFLOAT16, partial(score_plain, model, self._prompts), "transformers")

    def add(self, wanted: str) -> None:
        """Add the rows of the settings whose name contains `wanted`, or why they cannot run."""
        for setting in SETTINGS:
            if wanted not in setting.name:
                continue
            try:
                engine, path = setting.open(self._source, self._folder, LONGEST)
                self._add(setting.name, partial(score, engine, self._prompts), path)
                del engine
                gc.collect()  # the next model needs the memory
            except ModelLoadError as error:
                self._show(setting.name, {"skipped": error.cause.replace(error.uri, Path(error.uri).name)})

    def _add(self, name: str, run: Callable[[Callable[[torch.Tensor], None]], Scores], path: str) -> None:
        divergence: Divergence = self._distributions.compare()
        scores, reference = run(divergence.add), self._reference
        row: Row = {"nll": scores.nll, "change": scores.nll - reference.nll, "distance": scores.distance(reference)}
        self._show(name, row | {"divergence": divergence.mean, "agreement": scores.agreement(reference), "path": path})

    def _show(self, name: str, row: Row) -> None:
        self.rows[name] = row
        figures = (f"{row[column]:10.4f}" if column in row else " " * 10 for column in COLUMNS)
        print(f"{name:24}", *figures, "", row.get("path") or f"left out: {row['skipped']}", flush=True)


def measure(name: str, options: Namespace) -> Row:
    print(f"\n{name:24}", *(f"{column:>10}" for column in COLUMNS), "", "path", flush=True)
    model = Model(name, (options.text or TEXT).read_text(encoding="utf-8"))
    if options.setting in PLAIN_BFLOAT16:
        model.add_plain()
    model.add(options.setting)
    return {"tokens": model.tokens, "settings": model.rows}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--setting", default="", metavar="PART", help="only settings whose name contains PART")
    parser.add_argument("--text", type=Path, metavar="FILE", help="another text, in UTF-8 (default: bench/quality/text.txt)")
    parser.add_argument("--contexts", action="store_true", help="only SmolLM2 by position in a long context, computed in several ways")
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    if options.contexts:
        write_report(__name__, options, compare_ways())
        return
    results: Row = {}
    for name in options.models:
        results[name] = measure(name, options)
        write_report(__name__, options, results)
