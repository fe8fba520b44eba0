"""The process that checks a grammar before the engine gets it: `python -m fairlead_worker.grammar.checker`.

A grammar is a program written by a client. It may crash, fill the memory, or never end. Here it does so in a process with bounded memory
that its parent (`api/output/grammar_checker.py`) can kill. The process reads lines of JSON: first `Setup`, then `Constraint`s. It answers
each line with a `Verdict`, and exits at the end of its input.
"""

import os
import resource
import signal
import sys
import time

import msgspec
import numpy as np

from fairlead_common.truncate import truncate
from fairlead_worker.grammar.compiler import ENDLESS_MESSAGE, Compiler, GrammarError, Matcher, describe_error
from fairlead_worker.grammar.constraint import Constraint, Setup, Verdict
from fairlead_worker.grammar.lower import lower
from fairlead_worker.grammar.schema_walk import SchemaError

WALK_TOKENS = 32
"""Steps of the walk through each grammar."""
LIMIT_MESSAGE = "; it exceeds a limit of the compiler: make it smaller, or its repetitions shorter"
NICENESS = 10
"""Priority below the engine and the API, which must not wait for CPU cores."""


def check(compiler: Compiler, constraint: Constraint) -> Verdict:
    """Compile a constraint and walk through its grammar for some tokens. The verdict has the CPU time of compiling it once more."""
    try:
        grammar = lower(constraint, compiler.special)
        began = time.process_time()
        matcher = compiler.matcher(grammar)
        compiling = time.process_time() - began
        try:
            _walk(compiler, matcher)
        except GrammarError as error:
            limited = matcher.is_error() and str(error) != ENDLESS_MESSAGE
            raise GrammarError(f"{error}{LIMIT_MESSAGE if limited else ''}") from error
    except SchemaError as error:
        if error.field in constraint.fields:
            return Verdict(error=str(error), field=error.field)
        return Verdict(error=f"{error.field}: {error}" if error.field else str(error))
    except Exception as error:  # libraries raise errors of their own, and any error concerns this grammar
        return Verdict(error=truncate(" ".join(str(error).split())) or type(error).__name__)
    return Verdict(grammar=grammar, cpu_seconds=compiling)


def _walk(compiler: Compiler, matcher: Matcher) -> None:
    """Walk through the grammar with tokens from all over the vocabulary. Raise GrammarError.

    The compiler is lazy, so the first masks carry a grammar's cost.
    """
    mask = np.zeros(compiler.words, np.uint32)
    for step in range(WALK_TOKENS):
        compiler.fill(matcher, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            if step == 0 and not matcher.is_accepting():
                raise GrammarError("it allows no text at all in this model's tokens")
            return
        token = int(allowed[(step * 7919) % len(allowed)])
        if token in compiler.eos:
            return
        taken = matcher.consume_token(token)
        if matcher.is_error():
            raise GrammarError(describe_error(matcher))
        if not taken or matcher.is_stopped():
            return


def main() -> None:
    os.setpgid(0, 0)  # Ctrl-C is for the worker. In a session of its own, Linux's autogroups would ignore the niceness below.
    lines = sys.stdin.buffer
    setup = msgspec.json.decode(lines.readline(), type=Setup)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory, setup.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiler = Compiler(setup.tokenizer_json, setup.vocabulary, setup.eos)
    except GrammarError as error:
        _write(Verdict(error=str(error)))
        return
    _write(Verdict())
    for line in lines:
        signal.alarm(int(setup.timeout) + 2)  # SIGALRM ends the process by default, whatever it is doing
        began = time.process_time()
        verdict = check(compiler, msgspec.json.decode(line, type=Constraint))
        signal.alarm(0)
        _write(msgspec.structs.replace(verdict, cpu_seconds=verdict.cpu_seconds + time.process_time() - began))


def _write(verdict: Verdict) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(verdict) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
