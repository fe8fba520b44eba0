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
the other rows run through the product's engine unless they name transformers.

```
make bench-quality    # python -m bench quality, with and without --contexts
```

It writes this page. `--text FILE` measures another text, `--setting PART` only some rows. *Change* is the difference of the mean negative
log-likelihood (NLL) of the text's tokens from the reference's, in nats; changes of single tokens cancel in it. *Divergence* is the mean
Kullback-Leibler divergence of the whole distribution, in nats. *Agreement* is the share of positions whose likeliest token is the
reference's: greedy decoding goes the same way there.

"""
LIMITS = """## What the tables cannot show

- **The weights were in few bits before**: SmolLM2's in Q4_1, Gemma's in Q4_K, Q5_0, Q6_K and Q8_0; *float32* means these, widened. Another
  grid than the weights' own loses more, as Q5_0 and Q5_1 of SmolLM2 show. So do not take the order of the types from here.
- **Files of other types are made here** (`bench/quality/gguf_files.py`) with a simple quantizer; llama.cpp searches for better scales. Rows
  that do not fill blocks of 256 have another type, as in llama.cpp.
- **One text** of 2,500 tokens (`bench/quality/text.txt`): its NLL is uncertain. Rows share it, so their differences are far more exact.
- **Likelihood is not ability.** Small models hardly solve tasks, so tasks would measure chance.
- **KV in float8** needs a GPU. Here the reference backend rounds keys and values to the same numbers.

`tests/worker/quality` bounds these figures in each test run.
"""
CONTEXTS = """## By position in a long context

{title} in {dtype} over {tokens:,} tokens, whole and in other ways: NLL of each quarter of the positions. The last tokens repeat the
first ones, so the last quarter is likelier. *Differ* counts positions whose bits are not those of the whole prompt: none may
([exactness](../design/engine/exactness.md)). A cached prefix is not computed, so its quarters are empty.

"""


def page() -> str:
    """Return the page."""
    likelihood, contexts = (json.loads((REPORTS / f"{name}.json").read_text()) for name in ("likelihood", "contexts"))
    machine = likelihood["machine"]
    models = likelihood["results"]
    texts = ", ".join(f"{TITLES[name]} ({results['tokens']:,} tokens)" for name, results in models.items())
    about = (
        f"{texts}, on {machine['cores']} cores of {machine['cpu']} (level {machine['cpu_level']}), {machine['date'][:10]}, "
        f"commit {machine['commit']}.\nOther paths than the [native decoder](../design/engine/cpu.md): {_other_paths(models)}.\n\n"
    )
    return f"{INTRODUCTION}{about}{_settings(models)}{_contexts(contexts['results'])}{LIMITS}"


def _other_paths(models: Mapping[str, Any]) -> str:
    """Name the rows of the engine that the native decoder did not compute, and what did, with the reason if it refused."""
    rows = {name: row.get("path", "native") for results in models.values() for name, row in results["settings"].items()}
    return ", ".join(f"{name} ({path})" for name, path in rows.items() if path not in ("native", "transformers")) or "none"


def _settings(models: Mapping[str, Any]) -> str:
    """Return the table of all models."""
    header = ("Setting", *(f"{TITLES[name].partition('-')[0]}: {form}" for name in models for form in (*FORMS, "agreement")))
    names = dict.fromkeys(name for results in models.values() for name in results["settings"])
    rows = [(name, *(cell for results in models.values() for cell in _figures(results["settings"].get(name, {})))) for name in names]
    return _table(header, rows)


def _figures(row: Mapping[str, Any]) -> tuple[str, ...]:
    if "skipped" in row:
        return ("", "", f"left out: {row['skipped']}")
    if "agreement" not in row:
        return (f"NLL {row['nll']:.4f}", "", "") if row else ("", "", "")
    return (*(f"{row[name]:{form}}" for name, form in FORMS.items()), f"{100 * row['agreement']:.1f} %")


FORMS = {"change": "+.4f", "divergence": ".4f"}


def _contexts(results: Mapping[str, Any]) -> str:
    header = ("Way", "1st quarter", "2nd", "3rd", "4th", "Differ")
    ways = {name: way for name, way in results.items() if isinstance(way, dict)}
    figures: dict[tuple[str, ...], list[str]] = {}
    for name, way in ways.items():
        figures.setdefault((*(_or_empty(nll, ".4f") for nll in way["nll"]), _or_empty(way["differ"], "")), []).append(name)
    rows = [(", ".join(names), *row) for row, names in figures.items()]
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
