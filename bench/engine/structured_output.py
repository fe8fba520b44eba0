"""Structured output: whether answers validate, and the ITL of plain requests beside constrained ones.

Answers: 200 generated schemas at temperature 1 on a model with random weights. Each answer that finishes must validate. ITL: 8 plain
greedy streams run beside 8 others that arrive one by one, unconstrained on one side and constrained by a schema on the other. The
grammars are new, so compiling them is included. The p99 ITL of the plain streams may be 10 % worse. On a busy machine the CPU times of a
step are more reliable: those of the loop's thread and of all threads. With --threads 1 and OMP_WAIT_POLICY=PASSIVE the other threads are
those that compute masks.
"""

import json
import tempfile
import time
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jsonschema
from tokenizers import Tokenizer

from bench.common.compare import Figures, Target, parse_options, print_report, take_turns
from bench.common.random_schemas import schema
from bench.common.report import write_report
from bench.common.serving import PAGE_SIZE, Arrival, percentile, runner_for, scheduler_for, serve
from fairlead.random_model.build import make_model
from fairlead_index.hashing import tokens_from_bytes
from fairlead_worker.engine.grammar_queue import GrammarQueue
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.compiler import Compiler
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.model.loader import load_model
from fairlead_worker.sampling.grammars import Grammars

SCHEMAS, MOST_TOKENS = 200, 500
WATCHED, BESIDE, OUTPUT, APART_SECONDS = 8, 8, 240, 0.15
NESTABLE = [seed for seed in range(2 * BESIDE) if seed % 5 != 4][:BESIDE]
"""Seeds of schemas without references to themselves."""
TARGETS = [Target("structured_itl_p99", "itl_p99_ms", "structured", "free", 1 / 1.1)]


def answers(runner: ModelRunner, compiler: Compiler, tokenizer: Tokenizer, count: int) -> Counter[str]:
    """Return how the answers ended: "valid", "length" or "invalid"."""
    grammars = runner.grammars = Grammars(compiler)
    scheduler = scheduler_for(runner, eos_token_ids=compiler.eos)
    gate = GrammarQueue(scheduler.submit, grammars)
    schemas = {str(seed): schema(seed) for seed in range(count)}
    written: dict[str, array[int]] = {name: array("I") for name in schemas}
    ends: Counter[str] = Counter()
    for name, each in schemas.items():
        sampling = Sampling(MOST_TOKENS, temperature=1.0, seed=int(name))
        gate.submit(Submit(name, array("I", [5, 6, 7]).tobytes(), sampling, 1, grammar=lowered(compiler, each)))
    while len(gate) or not scheduler.idle:
        for refusal in gate.submit_ready():
            raise RuntimeError(refusal.error)
        plan = scheduler.plan()
        for output in scheduler.advance(plan, runner.execute(plan)) if plan else ():
            written[output.id] += tokens_from_bytes(output.tokens)
            if output.finish == "stop":
                tokens = written[output.id].tolist()
                text = tokenizer.decode(tokens[:-1] if output.stop_token is not None else tokens, skip_special_tokens=False)
                ends["valid" if valid(text, schemas[output.id]) else "invalid"] += 1
            elif output.finish is not None:
                ends[output.finish] += 1
    return ends


def valid(text: str, wanted: dict[str, object]) -> bool:
    try:
        jsonschema.validate(json.loads(text), wanted, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not valid: {text!r} for {json.dumps(wanted)}: {error!s:.200}")
        return False
    return True


def lowered(compiler: Compiler, wanted: dict[str, object]) -> str:
    verdict = check(compiler, Constraint("json", json.dumps(wanted), "bench"))
    assert not verdict.error, verdict.error
    return verdict.grammar


def main() -> None:
    chosen = parse_options(__name__, __doc__, repeats=5)
    size = (
        {"vocab": 2048, "layers": 1}
        if chosen.quick
        else {
            "vocab": 8192,
            "hidden": 768,
            "layers": 12,
            "heads": 12,
            "kv_heads": 4,
            "head_dim": 64,
            "intermediate": 2304,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder) / "small", "qwen3", vocab=2048, layers=1)
        loaded, text = load_model(f"file://{path}", dtype="auto"), (path / "tokenizer.json").read_text()
        compiler = Compiler(text, loaded.vocabulary_size, loaded.eos_token_ids)
        ends = answers(runner_for(loaded, 4096), compiler, Tokenizer.from_str(text), 20 if chosen.quick else SCHEMAS)
        print(f"answers to generated schemas: {dict(ends)}")
        path = make_model(Path(folder) / "large", "qwen3", dtype="bfloat16", **size)  # type: ignore[arg-type]  # each option has its field's type
        loaded, text = load_model(f"file://{path}", dtype="auto"), (path / "tokenizer.json").read_text()
        compiler = Compiler(text, loaded.vocabulary_size, loaded.eos_token_ids)
    output = 40 if chosen.quick else OUTPUT
    plain = [Arrival(0.0, [(i * 37 + j * 11) % 500 for j in range(64)], output) for i in range(WATCHED)]
    free = [Arrival(APART_SECONDS * (1 + i), [(i * 53 + j * 7) % 500 for j in range(64)], output, temperature=1.0) for i in range(BESIDE)]
    # Lists that do not end: as many tokens on both sides.
    kept = [
        replace(each, grammar=lowered(compiler, {"type": "array", "items": schema(seed), "minItems": 1000}))
        for seed, each in zip(NESTABLE, free, strict=True)
    ]
    runner = runner_for(loaded, sum(-(-(64 + output) // PAGE_SIZE) for _ in (*plain, *free)))

    def side(beside: list[Arrival]) -> Figures:
        runner.grammars = Grammars(compiler)
        loop, whole = time.thread_time(), time.process_time()
        served = serve(runner, [*plain, *beside])
        loop, whole = time.thread_time() - loop, time.process_time() - whole
        itls = served.itls(range(WATCHED))
        return {
            "itl_p50_ms": 1e3 * percentile(itls, 50),
            "itl_p99_ms": 1e3 * percentile(itls, 99),
            "beside_itl_p50_ms": 1e3 * percentile(served.itls(range(WATCHED, WATCHED + BESIDE)), 50),
            "output_tokens_s": served.output_rate,
            "loop_cpu_ms": 1e3 * loop / served.steps,
            "all_cpu_ms": 1e3 * whole / served.steps,
            "steps": served.steps,
        }

    runs = take_turns({"free": lambda: side(free), "structured": lambda: side(kept)}, chosen.repeats)
    about = {
        "model": "tiny" if chosen.quick else "qwen3-90M",
        "threads": chosen.threads,
        "plain": WATCHED,
        "beside": BESIDE,
        "answers": dict(ends),
    }
    write_report(__name__, chosen, print_report(about, runs, TARGETS))
    if ends["invalid"] or not ends["valid"]:
        raise SystemExit("an answer that finished does not validate")
