"""Decode rate with and without n-gram speculation, and whether both produce the same tokens.

The model is Qwen3-shaped with random weights (90M parameters, bfloat16). There are four texts: `certain` allows one token only, which is
the largest possible gain; `greedy`, where such a model repeats itself for a while and then changes (like code edits, extraction and
quotations); `four tokens`, drawn at random; and `unguessable` at temperature 1. The two sides alternate; ratios are of medians. Figures
are CPU time of one thread unless --threads says otherwise.
"""

import tempfile
import time
from array import array
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from bench.common.report import make_parser, write_report
from bench.engine.step_time import save
from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.model.loader import load_model
from fairlead_worker.scheduler.config import SchedulerConfig, SpeculativeMethod
from fairlead_worker.scheduler.scheduler import Scheduler

PROMPT, TOKENS, PAGE = 64, 128, 16
TEXTS: dict[str, dict[str, Any]] = {
    "certain": {"temperature": 1.0, "allowed_token_ids": (10,)},
    "greedy": {"temperature": 0.0},
    "four tokens": {"temperature": 1.0, "allowed_token_ids": (10, 20, 30, 40)},
    "unguessable": {"temperature": 1.0},
}
TARGETS = {("certain", 1): 3.0, ("certain", 8): 2.0, ("unguessable", 1): 0.95, ("unguessable", 8): 0.95}
"""Lower limit of the decode rate divided by that of plain decoding."""


def decode(
    runner: ModelRunner, method: SpeculativeMethod, rows: int, settings: dict[str, Any], clock: Callable[[], float]
) -> dict[str, Any]:
    """Decode `rows` requests. Return the seconds and the tokens of the steps after their prompts."""
    pages = rows * -(-(PROMPT + TOKENS) // PAGE)
    scheduler = Scheduler(SchedulerConfig(4096, speculative_method=method), PrefixCache(PagePool(pages, PAGE), PAGE, extend))
    for row in range(rows):
        prompt = array("I", [(row * 37 + place * 11) % 8000 for place in range(PROMPT)])
        scheduler.submit(Submit(str(row), prompt.tobytes(), Sampling(max_tokens=TOKENS, seed=row, ignore_eos=True, **settings), root=row))
    answers = {str(row): b"" for row in range(rows)}
    seconds, steps, output = 0.0, 0, 0
    while True:
        began = clock()
        plan = scheduler.plan()
        if not plan:
            break
        outputs = scheduler.advance(plan, runner.execute(plan))
        if not plan.prefill_tokens:
            seconds, steps = seconds + clock() - began, steps + 1
            output += sum(len(each.tokens) // 4 for each in outputs)
        for each in outputs:
            answers[each.id] += each.tokens
    drafts = scheduler.load().drafts
    rate = drafts.accepted / drafts.tokens if drafts and drafts.tokens else 0.0
    return {"rate": output / seconds, "steps": steps, "guessed": drafts.tokens if drafts else 0, "accepted": rate, "answers": answers}


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        save("90M", folder)
        loaded = load_model(folder, dtype="bfloat16")
    runner = make_runner(loaded, page_size=PAGE, kv_pages=max(options.rows) * -(-(PROMPT + TOKENS) // PAGE))
    results: dict[str, Any] = {}
    print(f"Qwen3 shape of 90M, bfloat16, {options.threads} thread(s), {PROMPT} tokens in, {TOKENS} out")
    print(f"{'text':12} {'rows':>4} {'plain':>9} {'ngram':>9} {'ratio':>6} {'steps':>11} {'guessed':>8} {'accepted':>9}")
    methods: tuple[SpeculativeMethod, ...] = ("none", "ngram")
    for text, settings in TEXTS.items():
        for rows in options.rows:
            runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
            for repeat in range(options.repeats):
                for method in methods if repeat % 2 else methods[::-1]:
                    runs[method].append(decode(runner, method, rows, settings, clock))
            plain, ngram = (runs[method][0] for method in methods)
            assert ngram["answers"] == plain["answers"], f"{text}, {rows} rows: speculation has changed the text"
            rates = {method: median(run["rate"] for run in runs[method]) for method in methods}
            ratio = rates["ngram"] / rates["none"]
            counted = f"{plain['steps']}→{ngram['steps']:<5} {ngram['guessed']:8} {ngram['accepted']:9.2f}"
            print(f"{text:12} {rows:4} {rates['none']:9.0f} {rates['ngram']:9.0f} {ratio:6.2f} {counted:>30}")
            results[f"{text}, {rows} rows"] = {
                "plain": rates["none"],
                "ngram": rates["ngram"],
                "ratio": ratio,
                "accepted": ngram["accepted"],
            }
    for (text, rows), target in TARGETS.items():
        if (row := results.get(f"{text}, {rows} rows")) is not None:
            print(f"speculative_{text}_{rows}_ratio {row['ratio']:.2f} {target} {'ok' if row['ratio'] >= target else 'short'}")
    write_report(__name__, options, results)
