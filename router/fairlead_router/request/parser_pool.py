"""The processes that read large bodies, and the fair order in which tenants use them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Final, TypeVar

import msgspec

from fairlead_common.fair_slots import FairSlots
from fairlead_common.prompts.encoder import PromptFormat
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_router.errors import ApiError
from fairlead_router.request import parser_process
from fairlead_router.request.body import Encoded, Encoding, RequestParams
from fairlead_router.request.parser_process import CPU_SECONDS, MAX_FORMATS, Encode, Finish, Load, Read, Refusal, Tokens, Valid, Validate

PROCESSES: Final = 2
"""With two, a tenant does not wait for another one's body."""
ANSWER_SECONDS: Final = 60.0
"""Longest wait for an answer. A process that computes reaches its limit of CPU time before, unless the machine is overloaded."""
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "1"}
"""One thread, so that the process's limits are those of a body."""
_answers = msgspec.msgpack.Decoder(tuple[float, RequestParams | Tokens | Valid | Refusal])
Answer = TypeVar("Answer", RequestParams, Tokens, Valid)
Result = TypeVar("Result")


class ParserProcess:
    """One process. Its methods block, and raise ApiError for a refused body, OSError or EOFError if the process ended."""

    def __init__(self, cache: TokenCache) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fd = theirs.fileno()
            command = [sys.executable, "-m", parser_process.__name__, str(fd), str(cache.max_bytes // PROCESSES)]
            environment = {**os.environ, **_ENVIRONMENT}
            # Ctrl-C is for the router. In a session of its own, Linux's autogroups would ignore the process's niceness.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[fd], env=environment, process_group=0)
            self._connection = Connection(ours.detach())
        self._cache = cache
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._used = self._taken = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def read(self, path: str, raw: bytes, session: str, has_canaries: bool, max_tokens: int) -> RequestParams:
        """Decode a body, and keep it for `encode`."""
        return self._ask(Read(path, session, has_canaries, max_tokens), raw, RequestParams)

    def validate(self, path: str, raw: bytes, max_tokens: int) -> None:
        self._ask(Validate(path, max_tokens), raw, Valid)

    def encode(self, name: str, format: PromptFormat, encoding: Encoding) -> Encoded:
        """Encode the prompt of the body that was read. `name` identifies the format."""
        if name not in self._loaded:
            self._send(Load(name, format))
            self._loaded[name] = None
            if len(self._loaded) > MAX_FORMATS:
                self._loaded.popitem(last=False)
        answer = self._ask(Encode(name, encoding), None, Tokens)
        self._cache.count(answer.hit_tokens, answer.missed_tokens)
        hashes = [array("Q", one) for one in answer.hashes]
        tokens = None if answer.tokens is None else array("I", answer.tokens)
        return Encoded(tokens, hashes, answer.is_single, answer.computed, answer.min_tokens)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def take_cpu_seconds(self) -> float:
        """Return the CPU seconds that the process used since the last call."""
        used, self._taken = self._used - self._taken, self._used
        return used

    def finish(self) -> None:
        """Let the process forget the body."""
        self._ask(Finish(), None, Valid)

    def kill(self) -> None:
        """End the process. A method that waits for it in another thread raises."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # another thread ends it too
            os.kill(self.pid, signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)  # Popen does not tell the CPU time
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._used = usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        self.kill()
        self._connection.close()

    def _send(self, message: msgspec.Struct) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))

    def _ask(self, message: msgspec.Struct, raw: bytes | None, kind: type[Answer]) -> Answer:
        self._send(message)
        if raw is not None:
            self._connection.send_bytes(raw)
        if not self._connection.poll(ANSWER_SECONDS):
            raise EOFError
        self._used, answer = _answers.decode(self._connection.recv_bytes())
        if isinstance(answer, Refusal):
            raise ApiError(answer.status, answer.message, param=answer.param, code=answer.code)
        assert isinstance(answer, kind)
        return answer


class ParserPool:
    """Up to PROCESSES processes, each started for its first body. One that ends is replaced, and only its request is refused."""

    def __init__(self, cache: TokenCache) -> None:
        """`cache`: the router's. The processes have caches of the same size together, and count into its figures."""
        self._cache = cache
        self._slots = FairSlots(PROCESSES)
        self._processes: dict[int, ParserProcess] = {}
        self._used: dict[int, float] = {}
        """CPU seconds of the job that ended last in a slot."""
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="parser")

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    async def run(self, tenant: str, job: Callable[[ParserProcess], Result], pay: Callable[[float], None] = lambda seconds: None) -> Result:
        """Run a job with one process, when it is the tenant's turn. Raises ApiError.

        If the client disconnects, its slot is held until the job ends. `pay` then gets the CPU seconds, whatever the result.
        """
        loop = asyncio.get_running_loop()
        return await self._slots.run(
            tenant,
            lambda slot: loop.run_in_executor(self._threads, self._run, slot, job),
            lambda slot: pay(self._used.pop(slot, 0.0)),
        )

    def close(self) -> None:
        """End the processes, and so the jobs that run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes.values()):
            process.kill()

    def _run(self, slot: int, job: Callable[[ParserProcess], Result]) -> Result:
        process = self._processes.get(slot)
        try:
            if process is None or process.has_ended:  # the system may end one that is idle
                process = self._processes[slot] = ParserProcess(self._cache)
            try:
                result = job(process)
            except ApiError:
                process.finish()
                raise
            process.finish()
            return result
        except ApiError:
            raise
        except Exception as error:
            if process is not None:  # a late answer in its pipe would be taken for that of the next job
                self._processes.pop(slot, None)
                with contextlib.suppress(OSError):
                    process.close()
            if isinstance(error, OSError | EOFError):
                raise _ended() from None
            raise
        finally:
            if process is not None:
                self._used[slot] = process.take_cpu_seconds()


def _ended() -> ApiError:
    message = f"The request body takes more than {CPU_SECONDS} s or too much memory to read and tokenize: send a shorter one."
    return ApiError(413, message, code="request_too_large")
