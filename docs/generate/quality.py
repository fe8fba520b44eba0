"""Write benchmarks/quality.md from the reports of `python -m bench quality` in bench/results/quality.

The page is committed, so that readers of the repository see the figures. `tests/docs` compares it with the reports.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "bench/results/quality"
PAGE = ROOT / "docs/benchmarks/quality.md"
TITLES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
INTRODUCTION = """<!-- Generated from bench/results/quality by docs/generate/quality.py. -->

# Quality

What rounding costs: the likelihood of a text in each setting, beside the same model in float32. The reference is transformers in float32,
the other rows run through the product's engine unless their path is transformers.

    python -m bench quality --json bench/results/quality/likelihood.json
    python -m bench quality --contexts --json bench/results/quality/contexts.json

`make bench-quality` runs both and writes this page. `--text FILE` measures another text, `--setting PART` only some rows.

NLL
:   The mean negative log-likelihood of the text's tokens, in nats. *Change* is its difference from the reference's. Changes of single
    tokens cancel in it.

Distance
:   The mean absolute difference of the log-probability of the text's own tokens, in nats. Rounding without direction changes it and hardly
    the NLL.

Divergence
:   The mean Kullback-Leibler divergence of the whole distribution from the reference's, in nats. llama.cpp's perplexity tool reports it
    too.

Agreement
:   The share of positions whose likeliest token is the reference's: greedy decoding goes the same way there.

Path
:   *native*: the [native decoder](../design/engine/cpu.md). *modules*: transformers' modules one by one, with the reason if the native
    decoder was tried and refused.

"""
LIMITS = """## What the tables cannot show

- **SmolLM2's weights were in Q4_1 before.** The only file of it that needs no model hub is. Grids of 4 bits fit such weights unusually
  well, and Q4_1 loses almost nothing. The same holds for Gemma's published file (Q4_K, Q5_0, Q6_K, Q8_0): *float32* means the weights of
  these files, widened. The rows compare ways to compute and store these weights, not 4 bits with the authors' own weights.
- **A grid that is not the weights' own loses more.** Q5_0 and Q5_1 lose more of SmolLM2 than Q4_1 with fewer bits: their steps do not fall
  on those of Q4_1. Take the order of the types from weights that were never quantized.
- **Files of other types are made here.** `bench/quality/gguf_files.py` widens the published file and quantizes it again, with the package
  `gguf`, or for Q4_K, Q5_K and Q6_K with the simple quantizer `bench/quality/k_quants.py`. llama.cpp searches for better scales.
- **Rows that do not fill blocks of 256 have another type**, as in llama.cpp: Q5_0, Q5_1 and Q8_0 instead of Q4_K, Q5_K and Q6_K. Both
  models have many of them (576 and 640 inputs). The embedding, which is also the head, has Q8_0 in each of these files.
- **One text** of 2,500 tokens, written for this benchmark: `bench/quality/text.txt` has stories, a recipe, code, letters and figures. The
  NLL of so few tokens is uncertain, but rows share the text, so their differences are far more exact.
- **Likelihood is not ability.** Small models hardly solve tasks, so tasks would measure chance.
- **KV in float8** needs a GPU. Here the reference backend computes it, module by module, and rounds keys and values to the same numbers.

`tests/worker/quality` bounds these figures in each test run.
"""
CONTEXTS = """## By position in a long context

{title} in {dtype} over {tokens:,} tokens, whole and in other ways. The NLL is that of each quarter of the positions. The last
tokens repeat the first ones, so the last quarter is likelier. *Differ* counts positions whose bits are not those of the whole prompt: none
may ([exactness](../design/engine/exactness.md)). A cached prefix is not computed, so its quarters are empty.

"""


def page() -> str:
    """Return the page."""
    likelihood, contexts = (json.loads((REPORTS / f"{name}.json").read_text()) for name in ("likelihood", "contexts"))
    machine = likelihood["machine"]
    about = f"Measured on {machine['cores']} cores of {machine['cpu']} (level {machine['cpu_level']}), {machine['date'][:10]}, "
    models = "".join(_model(TITLES[name], results) for name, results in likelihood["results"].items())
    return f"{INTRODUCTION}{about}commit {machine['commit']}.\n\n{models}{_contexts(contexts['results'])}{LIMITS}"


def _model(title: str, results: Mapping[str, Any]) -> str:
    header = ("Setting", "NLL", "Change", "Distance", "Divergence", "Agreement", "Path")
    rows = [(name, *_figures(row)) for name, row in results["settings"].items()]
    return f"## {title}\n\n{results['tokens']:,} tokens.\n\n{_table(header, rows)}"


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "skipped" in row:
        return ("", "", "", "", "", f"left out: {row['skipped']}")
    change, distance, divergence = (f"{row[name]:{form}}" if name in row else "" for name, form in FORMS.items())
    agreement = f"{100 * row['agreement']:.1f} %" if "agreement" in row else ""
    return f"{row['nll']:.4f}", change, distance, divergence, agreement, row["path"]


FORMS = {"change": "+.4f", "distance": ".4f", "divergence": ".4f"}


def _contexts(results: Mapping[str, Any]) -> str:
    header = ("Way", "1st quarter", "2nd", "3rd", "4th", "Distance", "Differ")
    ways = {name: way for name, way in results.items() if isinstance(way, dict)}
    rows = [
        (name, *(_or_empty(nll, ".4f") for nll in way["nll"]), f"{way['distance']:.4f}", _or_empty(way["differ"], ""))
        for name, way in ways.items()
    ]
    text = CONTEXTS.format(title=TITLES["smollm2"], dtype=results["dtype"], tokens=results["tokens"])
    return text + _table(header, rows)


def _or_empty(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(header)
    lines = [f"| {' | '.join(names)} |", f"| --- |{' ---: |' * (len(names) - 2)} --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
