"""Checks grammars in a separate process. A grammar that takes too long gets it killed; a process that died is replaced."""

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from fairlead_common.fair_slots import FairSlots
from fairlead_common.truncate import truncate
from fairlead_worker.api.errors import ApiError, busy, invalid
from fairlead_worker.config import WorkerConfig
from fairlead_worker.grammar.constraint import Constraint, Setup, Verdict
from fairlead_worker.platform.processes import cpu_seconds, ended_cpu_seconds

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Seconds for the process to read the tokenizer."""
MEMORY_LIMIT_BYTES = 3 << 30
"""Address space of the process in bytes. Libraries and the tokenizer map most of 1 GiB of it."""
SINGLE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
DISABLED_MESSAGE = "structured output is disabled (--limits max_grammar_bytes 0)"
CACHED_GRAMMARS = 64
MAX_WAITING = 64
"""Unchecked grammars of a tenant that may wait in the queue. Its further requests get 429."""


class GrammarChecker:
    """A cache of checked grammars, and the process that checks one grammar at a time. The first grammar starts the process.

    Tenants take turns, so that another one's slow grammars delay a grammar by one of them.
    """

    def __init__(self, config: WorkerConfig, tokenizer_json: str, vocabulary: int, eos: tuple[int, ...]) -> None:
        self._config = config
        self._setup = Setup(tokenizer_json, vocabulary, eos, config.limits.grammar_timeout, MEMORY_LIMIT_BYTES)
        self._verdicts: OrderedDict[Constraint, Verdict] = OrderedDict()
        self._turns = FairSlots(1)
        self._waiting = Counter[str]()
        """Waiting grammars by tenant."""
        self._process: asyncio.subprocess.Process | None = None

    async def compile(self, constraint: Constraint, tenant: str, report_cpu: Callable[[float], None]) -> str:
        """Return the engine's grammar for `constraint`. Raise ApiError 400 that names the field, or 429 if too many of the tenant wait.

        `report_cpu` gets the CPU seconds of checking and compiling it, also for one that is refused and after the client has left.
        """
        size, most = len(constraint.text.encode("utf-8", "surrogatepass")), self._config.limits.max_grammar_bytes
        if size > most:
            message = f"{size} bytes exceed this worker's limit of {most} (--limits max_grammar_bytes)" if most else DISABLED_MESSAGE
            raise invalid(f"{constraint.field}: {truncate(message)}", param=constraint.field)
        verdict = self._lookup(constraint) or await self._check_queued(constraint, tenant, report_cpu)
        if verdict.error:
            field = verdict.field or constraint.field
            raise invalid(f"{field}: {verdict.error}", param=field, code="invalid_grammar")
        return verdict.grammar

    def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()

    def _lookup(self, constraint: Constraint) -> Verdict | None:
        verdict = self._verdicts.get(constraint)
        if verdict is not None:
            self._verdicts.move_to_end(constraint)
        return verdict

    async def _check_queued(self, constraint: Constraint, tenant: str, report_cpu: Callable[[float], None]) -> Verdict:
        if self._waiting[tenant] >= MAX_WAITING:
            raise busy(
                f"{MAX_WAITING} of your requests wait for their grammars to be compiled", max(1, round(self._config.limits.grammar_timeout))
            )
        self._waiting[tenant] += 1
        try:
            # The turn lasts as long as the check: after a disconnect, the reply must not stay in the pipe for the next grammar.
            return await self._turns.run(tenant, lambda _: asyncio.ensure_future(self._check(constraint, report_cpu)))
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]

    async def _check(self, constraint: Constraint, report_cpu: Callable[[float], None]) -> Verdict:
        """Return the verdict on a grammar in its turn. An equal one may have been checked while it waited."""
        return self._lookup(constraint) or self._remember(constraint, await self._run_check(constraint, report_cpu))

    def _remember(self, constraint: Constraint, verdict: Verdict) -> Verdict:
        if verdict.error:
            logger.info("refused a grammar in %s: %s", constraint.field, verdict.error)
        self._verdicts[constraint] = verdict
        while len(self._verdicts) > CACHED_GRAMMARS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _run_check(self, constraint: Constraint, report_cpu: Callable[[float], None]) -> Verdict:
        """Check one grammar in the process. If the process dies, try once more, because the cause may be external; refuse after the second
        time."""
        for _ in range(2):
            process = await self._ensure_process()
            before, is_final = ended_cpu_seconds() + cpu_seconds(process.pid), False
            assert process.stdin is not None and process.stdout is not None, "they are pipes"
            seconds = self._config.limits.grammar_timeout
            reason = "it needs too much memory or too deep nesting to compile"
            try:
                process.stdin.write(msgspec.json.encode(constraint) + b"\n")
                async with asyncio.timeout(seconds):
                    line = await process.stdout.readline()
                if line:
                    verdict = msgspec.json.decode(line, type=Verdict)
                    report_cpu(verdict.cpu_seconds)
                    return verdict
            except ConnectionError:
                pass
            except TimeoutError:
                reason = f"it is not compiled within {seconds:g} s (--limits grammar_timeout); make it smaller, or its repetitions shorter"
                is_final = True
            except ValueError:
                reason, is_final = "its compiled form is too long", True
            await self._kill_process(process)
            report_cpu(min(ended_cpu_seconds() - before, seconds))  # it is among the ended ones now, as another child may be
            if is_final:
                break
        return Verdict(error=reason)

    async def _ensure_process(self) -> asyncio.subprocess.Process:
        """Return the process, ready for a line. Raise ApiError 400 if this model's tokenizer does not work with grammars."""
        if self._process is not None and self._process.returncode is None:
            return self._process
        command = (sys.executable, "-m", "fairlead_worker.grammar.checker")
        limit = 16 * self._config.limits.max_grammar_bytes + (1 << 20)  # of a reply line: a grammar with JSON escapes
        self._process = process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=limit,
            env=SINGLE_THREAD | dict(os.environ),
        )
        assert process.stdin is not None and process.stdout is not None, "they are pipes"
        process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
            error = msgspec.json.decode(line, type=Verdict).error if line else "its process ended"
        except TimeoutError:
            error = f"its process did not start within {START_SECONDS:g} s"
        if error:
            await self._kill_process(process)
            raise ApiError(400, f"structured output is not available on this worker: {error}", code="unsupported")
        return process

    async def _kill_process(self, process: asyncio.subprocess.Process) -> None:
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
