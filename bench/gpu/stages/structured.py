"""Stage: decodes whose every token has a mask from a grammar, beside free ones, with steps launched ahead and graphs."""

import time
from array import array
from collections.abc import Iterator
from typing import Any

from bench.gpu.device import Device, median
from bench.gpu.loop import Loop
from bench.gpu.model import saved
from bench.gpu.report import beside
from bench.gpu.roofline import beside_roofline, decode_work, rates_of
from bench.gpu.shared_model import Kit
from fairlead_worker.engine.grammar_queue import GrammarQueue
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.compiler import Compiler
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.sampling.grammars import Grammars

PATTERN = "[a-z0-9 ]+"
"""A regular expression without an end."""
TURNS = 3


def measure(device: Device, kit: Kit) -> Iterator[dict[str, Any]]:
    """Rows by number of streams: tokens a second with masks and without, the median of turns that alternate."""
    counts, prompt, new = ((1, 8, 64), 256, 128) if not device.tiny else ((1, 3), 12, 6)
    shape, rates = "tiny" if device.tiny else "8b", rates_of(device)
    runner = kit.shared(counts[-1] * -(-(prompt + new + 16) // 16) + 64, counts[-1])
    with saved(device, shape) as folder:
        text = (folder / "tokenizer.json").read_text()
    compiler = Compiler(text, runner.loaded.vocabulary_size, runner.loaded.eos_token_ids)
    verdict = check(compiler, Constraint("regex", PATTERN, "bench"))
    assert not verdict.error, verdict.error
    runner.grammars = Grammars(compiler)
    try:
        for streams in counts:
            found: dict[str, list[float]] = {"": [], verdict.grammar: []}
            for _ in range(1 if device.tiny else TURNS):
                for grammar, seen in found.items():
                    seen.append(decode(runner, runner.grammars, grammar, streams, prompt, new))
            free, masked = (median(seen) for seen in found.values())
            row = {"what": f"{streams} streams with a grammar", "ok": True, "tokens_per_s": masked, "free_tokens_per_s": free}
            row = beside_roofline(row, rates, decode_work(shape, streams, prompt + new / 2), streams / masked)
            yield beside(row | {"of_free": masked / free}, "of_free", least=0.95)
    finally:
        runner.grammars = None


def decode(runner: ModelRunner, grammars: Grammars, grammar: str, streams: int, prompt: int, new: int) -> float:
    """Return the tokens a second of all streams together, from when each has its first token."""
    loop = Loop(runner, overlap=True, max_num_seqs=streams, dedupe_tokens=0)
    queue = GrammarQueue(loop.scheduler.submit, grammars)
    for number in range(streams):
        loop.tokens[number], loop.times[number] = [], []
        tokens = array("I", range(10 + number, 10 + number + prompt)).tobytes()
        message = Submit(str(number), tokens, Sampling(max_tokens=new, temperature=0, ignore_eos=True), 1, grammar=grammar)
        refused = queue.submit(message) if grammar else loop.scheduler.submit(message)
        assert refused is None, refused
    while len(queue):
        assert not queue.submit_ready(), "the grammar is compiled"
        time.sleep(0.001)
    loop.run()
    assert all(len(told) == new for told in loop.tokens.values()), "each answer has all of its tokens"
    began = max(times[0] for times in loop.times.values())
    later = [at for times in loop.times.values() for at in times if at > began]
    return len(later) / (max(later) - began)
