"""Grammars of running requests: one matcher for each, which follows the accepted tokens of its request.

Threads fill masks while the forward pass runs. A late mask does not delay the batch: its row gets no token in this step and is in the
next step again. So an expensive grammar slows down only its own request.
"""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fairlead_worker.grammar.compiler import Compiler, GrammarError, Matcher, describe_error
from fairlead_worker.ipc.messages import GRAMMAR_WAITED
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.scheduler.plan import Row
from fairlead_worker.scheduler.request import Request

logger = logging.getLogger(__name__)

PATIENCE, LEAST_PATIENCE_SECONDS = 0.05, 0.0005
"""How long a batch waits for late masks: a share of the step's duration so far, with a lower bound."""
LOOK_SECONDS = 0.0002
"""How often a wait for masks looks whether the forward pass is over."""
ALONE_SECONDS = 0.05
"""The longest wait if the mask of every row is late. Without tokens the step is useless, but the loop must still receive aborts, and new
requests, which wait for it."""
SLOWER = 2
"""Allowed compilation time here, beside the model, as a multiple of the time in the process that validated the grammar."""


@dataclass(slots=True, eq=False)
class _Followed:
    """State of a request with a grammar."""

    request: Request
    matcher: Matcher | None = None
    """None until a thread has made it. The loop uses it only while `filling` is false."""
    prototype: "Future[Matcher] | None" = None
    """The compiled grammar that it is copied from, complete before a thread uses it."""
    known: list[int] = field(default_factory=list)
    """The output before the matcher starts. The request may have more when a thread reads it."""
    masks: np.ndarray | None = None
    """[positions, words] uint32: the mask of the request's next token and of the token after each one of `draft`. None: not filled."""
    draft: list[int] = field(default_factory=list)
    applied: int = 0
    """Leading positions of the row that have a mask in this step. Later masks are for the next step."""
    filling: bool = False
    late: bool = False
    """A step went on without its mask."""
    asked: float = 0.0
    """When its masks were requested; `perf_counter` seconds, as all times here."""
    patience: float = 0.0
    """Seconds that it may wait for a thread: the allowed time of the compilations and masks before it."""
    started: float = 0.0
    """When a thread began to fill its masks; 0: not yet."""
    abandoned: bool = False
    """Its thread exceeded the timeout and was replaced."""
    error: str = ""


class Grammars:
    """Owner of all matchers. Used by the loop's thread; `compile` hands work to other threads."""

    def __init__(self, compiler: Compiler, *, threads: int = 2, entries: int = 64, timeout: float = 5.0, waits: bool = False) -> None:
        """`entries`: compiled grammars that are kept. `timeout`: seconds of filling masks after which a request ends.

        Waiting for a thread does not count. It is bounded by the `timeout` of each mask before it.

        `waits`: steps wait for all masks, and a mask that takes too long ends its request: a recurrent state cannot compute a token again.
        So there an expensive grammar slows down all requests, by up to `timeout` at each of its tokens.
        """
        self._waits = waits
        self._compiler = compiler
        self._timeout = timeout
        self._entries = entries
        self._compiled: OrderedDict[str, Future[Matcher]] = OrderedDict()
        self._followed: dict[str, _Followed] = {}
        self._compilers = ThreadPoolExecutor(1, "compile")
        self._compiling = 0
        """Grammars that are compiling or wait for that."""
        self._fillers = ThreadPoolExecutor(2 * threads, "mask")
        """Of these, `threads` work at a time. A thread cannot be stopped, so one that exceeds the timeout is replaced while spare ones
        exist."""
        self._threads = threads
        self._working = self._abandoned = 0
        """Threads that fill masks; those of them that were replaced."""
        self._queue: deque[_Followed] = deque()
        self._filled = threading.Condition()
        """Guards everything that the threads and the loop share."""
        self._awaited = 0
        """Number of masks that are being filled and are not late."""
        self._began = 0.0
        self.is_used = False
        """A grammar was requested. Until then steps skip grammars."""

    def compile(self, grammar: str) -> "Future[str]":
        """Compile a grammar; the result is the error, or empty. Implements `engine.grammar_queue.GrammarCompiler`."""
        self.is_used = True
        result: Future[str] = Future()
        self._prototype(grammar).add_done_callback(lambda done: result.set_result(str(done.exception() or "")))
        return result

    @property
    def patience(self) -> float:
        """Return the seconds that a grammar requested now may take to compile, including those before it."""
        return SLOWER * self._timeout * max(1, self._compiling)

    def begin(self, rows: Sequence[Row]) -> None:
        """Start filling the masks of `rows`, whose forward pass is about to run; all of them sample and have a grammar."""
        self._began = time.perf_counter()
        self._followed = {name: each for name, each in self._followed.items() if each.request.finish is None}
        asked: list[_Followed] = []
        for row in rows:
            each = self._followed.get(row.request.id)
            if each is None or each.request is not row.request:
                each = self._followed[row.request.id] = _Followed(row.request)
            if each.filling or each.error or self._usable(each, row):
                continue
            each.draft, each.masks, each.filling = list(row.draft), None, True
            each.asked, each.started = self._began, 0.0
            if each.matcher is None:
                each.prototype = self._prototype(row.request.submit.grammar)
                each.known = row.request.tokens[row.request.prompt_length :].tolist()
            asked.append(each)
        if not asked:
            return
        with self._filled:
            self._awaited += len(asked)
            for place, each in enumerate(asked):
                before = (len(self._queue) + self._working + place) // self._threads
                each.patience = (before + 1) * self._timeout + SLOWER * self._compiling * self._timeout
        for each in asked:
            if each.matcher is None and each.prototype is not None and not each.prototype.done():
                each.prototype.add_done_callback(partial(self._compiled_for, each))  # no thread waits for a compiler
            else:
                self._queue.append(each)
        self._wake()

    def masks(self, rows: Sequence[Row], has_others: bool, is_computed: Callable[[], bool]) -> Masks:
        """Return the masks of the rows passed to `begin` that are ready in time, by position among all sampling rows.

        `has_others`: the step also computes parts of prompts, which a late mask must not delay. `is_computed`: whether the forward pass is
        over. Until then nothing else could be done with its logits, so no mask is late.
        """
        mine = [self._followed[row.request.id] for row in rows if row.request.submit.grammar]
        self._wait(mine, len(mine) == len(rows) and not has_others, is_computed)
        places: list[int] = []
        words: list[np.ndarray] = []
        first = 0
        for row in rows:
            if row.request.submit.grammar:
                each = self._followed[row.request.id]
                each.applied = self._usable(each, row)
                places += range(first, first + each.applied)
                if each.applied and each.masks is not None:
                    words.append(each.masks[: each.applied])
            first += len(row.draft) + 1
        return Masks(places, np.concatenate(words) if words else np.empty((0, self._compiler.words), np.uint32))

    def accept(self, rows: Sequence[Row], tokens: Sequence[list[int]], masks: Masks) -> dict[str, str]:
        """Follow the `tokens` chosen for the sampling rows. Tokens that a grammar has no mask for are removed in place.

        `masks`: the applied masks of this step. Returns the requests whose grammar has ended, as `StepResult.endings`.
        """
        endings: dict[str, str] = {}
        dead, first = masks.dead, 0
        for row, chosen in zip(rows, tokens, strict=True):
            if row.request.submit.grammar:
                each = self._followed[row.request.id]
                ending = each.error or None
                del chosen[0 if ending else each.applied :]
                if chosen:
                    alive = next((place for place in range(len(chosen)) if first + place in dead), len(chosen))
                    del chosen[alive:]
                    ending = self._follow(each, chosen, nothing_left=alive == 0)
                elif ending is None:
                    ending = self._overdue(each) or (f"{GRAMMAR_WAITED} {each.patience:g} s" if self._waits else None)
                if ending is not None:
                    endings[row.request.id] = ending
            first += len(row.draft) + 1
        return endings

    def _follow(self, each: _Followed, chosen: list[int], nothing_left: bool) -> str | None:
        """Advance a matcher by the chosen tokens. Return how its grammar ended; None if it continues."""
        request, matcher = each.request, each.matcher
        assert matcher is not None, "it has filled a mask"
        if nothing_left:
            each.masks = None
            if matcher.is_accepting():
                return ""
            return "no token can be chosen: the request forbids every token that its grammar allows"
        for place, token in enumerate(chosen):
            if token in request.stop_tokens and request.output_length + place + 1 >= request.sampling.min_tokens:
                break  # the scheduler ends the request here
            if not matcher.consume_token(token):
                del chosen[place:]
                each.masks = None
                return f"its grammar allows no continuation: {describe_error(matcher)}"
            if matcher.is_stopped():
                del chosen[place + 1 :]
                return ""
        each.masks, each.late = None, False
        return None

    def _usable(self, each: _Followed, row: Row) -> int:
        """Return how many leading positions of a row have masks that were filled for the same draft."""
        if each.filling or each.masks is None:
            return 0
        same = next((i for i, (was, now) in enumerate(zip(each.draft, row.draft, strict=False)) if was != now), None)
        most = min(len(each.draft), len(row.draft)) if same is None else same
        if len(each.masks) <= most:
            return len(each.masks)  # the grammar refuses or ends after the draft's next token
        return most + 1

    def _overdue(self, each: _Followed) -> str | None:
        """Return why the request must not wait any longer; None if it may. Replaces its thread."""
        with self._filled:
            now = time.perf_counter()
            if not each.filling:
                return None
            if not each.started:
                return f"{GRAMMAR_WAITED} {each.patience:g} s" if now - each.asked > each.patience else None
            if now - each.started <= self._timeout:
                return None
            each.request.mask_seconds += self._timeout
            if self._abandoned < self._threads:
                each.abandoned = True
                self._abandoned += 1
        self._wake()
        return f"its grammar took longer than {self._timeout:g} s for one token (--limits grammar_timeout)"

    def _wait(self, mine: Sequence[_Followed], alone: bool, is_computed: Callable[[], bool]) -> None:
        with self._filled:
            if self._waits and mine:
                self._filled.wait_for(lambda: not any(each.filling for each in mine), max(each.patience for each in mine) + self._timeout)
            elif self._awaited and not is_computed():
                while self._awaited and not is_computed():
                    self._filled.wait(LOOK_SECONDS)
            elif self._awaited:
                spent = time.perf_counter() - self._began
                self._filled.wait_for(lambda: not self._awaited, max(spent * PATIENCE, LEAST_PATIENCE_SECONDS))
            if alone and mine and all(each.filling for each in mine):
                self._filled.wait_for(lambda: not all(each.filling for each in mine), ALONE_SECONDS)
            for each in mine:
                if each.filling and not each.late:
                    each.late = True
                    self._awaited -= 1

    def _prototype(self, grammar: str) -> "Future[Matcher]":
        """Return the compiled grammar at its start. It is only copied, never advanced."""
        found = self._compiled.get(grammar)
        if found is None:
            with self._filled:
                self._compiling += 1
            found = self._compiled[grammar] = self._compilers.submit(self._compiler.matcher, grammar)
            found.add_done_callback(self._compiled_one)
            while len(self._compiled) > self._entries:
                self._compiled.popitem(last=False)
        else:
            self._compiled.move_to_end(grammar)
        return found

    def _compiled_one(self, _: "Future[Matcher]") -> None:
        with self._filled:
            self._compiling -= 1

    def _compiled_for(self, each: _Followed, _: "Future[Matcher]") -> None:
        self._queue.append(each)
        self._wake()

    def _wake(self) -> None:
        """Start as many threads as there is work for."""
        with self._filled:
            more = min(len(self._queue), self._threads + self._abandoned - self._working)
            self._working += max(0, more)
        for _ in range(more):
            self._fillers.submit(self._work)

    def _work(self) -> None:
        """Fill queued masks. Runs on a thread."""
        while True:
            with self._filled:
                if not self._queue:
                    self._working -= 1
                    return
                each = self._queue.popleft()
                each.started = time.perf_counter()
            try:
                if each.request.finish is None:  # a request may end while it waits for a thread
                    began = time.thread_time()
                    try:
                        each.masks = self._fill(each)
                    finally:
                        each.request.mask_seconds += time.thread_time() - began
            except GrammarError as error:
                each.error = f"its grammar allows no continuation: {error}"
            except BaseException as error:  # a panic of the library is not an Exception
                logger.exception("a mask could not be filled")
                each.error = f"its grammar failed: {type(error).__name__}: {error}"
            with self._filled:
                each.filling = False
                if not each.late:
                    self._awaited -= 1
                self._filled.notify()
                if each.abandoned:  # another thread works in its place
                    self._abandoned -= 1
                    self._working -= 1
                    return

    def _fill(self, each: _Followed) -> np.ndarray:
        """Return masks [positions, words], up to the first drafted token that the grammar refuses or that ends the request."""
        request = each.request
        if each.matcher is None:
            each.matcher = self._start(each)
        matcher, filled, consumed = each.matcher, 0, 0
        masks = np.zeros((len(each.draft) + 1, self._compiler.words), np.uint32)
        for token in [*each.draft, None]:
            self._compiler.fill(matcher, masks[filled])
            self._ends(masks[filled], request, matcher.is_accepting())
            filled += 1
            if token is None or token in request.stop_tokens or not matcher.try_consume_tokens([token]):
                break
            consumed += 1
            if matcher.is_stopped():
                break
        if consumed and not matcher.rollback(consumed):
            raise GrammarError(describe_error(matcher))
        return masks[:filled]

    def _start(self, each: _Followed) -> Matcher:
        """Return a matcher that has consumed the output known at the request."""
        assert each.prototype is not None, "set before it was queued"
        matcher: Matcher = each.prototype.result().deep_copy()
        if each.known and not matcher.consume_tokens(each.known):
            raise GrammarError(describe_error(matcher))
        return matcher

    def _ends(self, mask: np.ndarray, request: Request, accepting: bool) -> None:
        """Allow, in place, the tokens that end this request where the grammar is complete, and no other end tokens."""
        for token in self._compiler.eos:
            mask[token >> 5] &= ~np.uint32(1 << (token & 31))
        if accepting:
            for token in request.stop_tokens:
                if token >> 5 < len(mask):
                    mask[token >> 5] |= np.uint32(1 << (token & 31))
