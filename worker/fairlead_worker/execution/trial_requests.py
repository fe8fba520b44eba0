"""Requests of the start-up trial: decodes for every CUDA graph, chunks beside decodes, and prompts for every piecewise graph.

Sampled requests choose between two tokens. Among all tokens, a draw depends on the sum of all probabilities before a token, so any rounding
moves it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from msgspec import structs

from fairlead_worker.execution.cuda_graphs.decodes import batch_sizes
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits

MOST_ROWS = 8
"""Most decodes in a step without graphs to compare."""
CHUNK = 64
"""Most tokens of a chunk, so that prompts are computed in several."""
LONGEST_WINDOW = 2048
"""Sliding windows up to this many tokens are exceeded by a request."""
REPETITIONS = 64
"""Tokens of a prompt that consists of two, so that it has nearly all of their n-grams of up to four tokens."""
NEW_TOKENS = 8
"""Tokens of each request that runs beside chunks or is drafted for."""
MEASURED_PROMPTS, MEASURED_LOGITS = 8, 20
"""Beginnings of a text whose next token is compared with float32, and log-probabilities that are compared for each."""
SAMPLINGS = (
    Sampling(max_tokens=1, temperature=0, ignore_eos=True),
    Sampling(max_tokens=1, temperature=0.8, seed=7, ignore_eos=True),
    Sampling(max_tokens=1, temperature=0, repetition_penalty=1.3, ignore_eos=True),
    Sampling(max_tokens=1, temperature=1.0, top_p=0.9, seed=11, logprobs=2, ignore_eos=True),
)
"""Sampling of the trial's requests, in turns: greedy, seeded, and two that depend on earlier tokens or drop unlikely ones."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that arrive at once."""

    config: SchedulerConfig
    requests: Sequence[Submit]


class TrialRequests:
    """The requests for one runner, in the order in which they run."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, context: int, adapter: int) -> None:
        """`context` and `adapter`: as for `trial.try_modes`."""
        self._runner = runner
        self._page_size, self._pages = runner.backend.spec.page_size, runner.backend.pages
        self._random = Random(5)
        limits = StepLimits.from_config(config, self._page_size)
        common = replace(
            config,
            max_prefill_tokens=min(config.max_prefill_tokens, limits.prefill),
            prefill_max_requests=0,
            idle_prefill_chunks=1,
            itl_target_ms=0,
            policy="fcfs",
            initial_new_token_ratio=1.0,
            min_new_token_ratio=1.0,
        )
        self.waves = [self._decodes(common, context, 0)]
        if adapter:
            self.waves.append(self._decodes(common, context, adapter))
        self.waves.append(self._chunks(common, context, adapter))
        if runner.pieces is not None:
            self.waves.append(self._prompts(common, context, runner.pieces.sizes, limits.prefill))
        if config.speculative_method == "ngram":
            self.waves.append(self._repetitions(common, context))
        self.measured = self._measured(common, context)
        """Prompts whose log-probabilities are compared with float32."""

    def _decodes(self, config: SchedulerConfig, context: int, adapter: int) -> Wave:
        """Return short prompts that are computed together, and then end one after another: a step for each graph, full and padded in turns.

        All or, with an adapter, two of three requests have no adapter.
        """
        graphs = self._runner.graphs
        sizes = batch_sizes(MOST_ROWS) if graphs is None else graphs.sizes
        most = min(config.max_num_seqs, self._pages // -(-(6 + len(sizes) + 2) // self._page_size))
        counts = [
            max(size - place % 2, (sizes[place - 1] if place else 0) + 1) for place, size in enumerate(sizes) if size <= most or not place
        ]
        requests = []
        for number in range(counts[-1]):
            prompt = 3 + number % 4
            new = min(1 + sum(count > number for count in counts), max(1, context - prompt))
            sampling = structs.replace(SAMPLINGS[number % 2], max_tokens=new, seed=number)
            requests.append(self._request(f"decode {number}, adapter {adapter}", prompt, sampling, adapter if number % 3 == 1 else 0))
        return Wave(replace(config, chunked_prefill_size=0), requests)

    def _measured(self, config: SchedulerConfig, context: int) -> Wave:
        """Return beginnings of the model's trial text that run together. The name of each ends with the place of its last token there."""
        logits = min(MEASURED_LOGITS, self._runner.loaded.vocabulary_size)
        sampling = Sampling(max_tokens=1, temperature=0, logprobs=logits, ignore_eos=True)
        text = self._runner.loaded.reference.text.tokens[0]
        lengths = [length for length in range(2, len(text) + 1, -(-len(text) // MEASURED_PROMPTS)) if length < context] or [1]
        most = min(config.max_num_seqs, max(1, self._pages // (-(-(len(text) + 1) // self._page_size) + 1)))
        requests = [
            Submit(f"trial, measured {length - 1}", array("I", text[:length].tolist()).tobytes(), sampling, 0) for length in lengths[-most:]
        ]
        return Wave(replace(config, chunked_prefill_size=0), requests)

    def _chunks(self, config: SchedulerConfig, context: int, adapter: int) -> Wave:
        """Return prompts that are computed in chunks beside decodes. One exceeds the shortest sliding window, unless that is long."""
        windows = [kind.window for kind in self._runner.backend.spec.layers if kind.window is not None]
        window = min((window for window in windows if window <= LONGEST_WINDOW), default=0)
        chunk = max(CHUNK, -(-window // 8))
        if config.chunked_prefill_size > 0:
            chunk = min(config.chunked_prefill_size, chunk)
        lengths, requests, left = (5, 17, 9, 2 * chunk + 7, chunk + 3, window + chunk // 2), list[Submit](), self._pages
        for number, length in enumerate(lengths):
            prompt = max(1, min(length, context - NEW_TOKENS))
            left -= -(-(prompt + NEW_TOKENS) // self._page_size) + 1
            if left < 0 and requests:
                break
            new = max(1, min(NEW_TOKENS, context - prompt, left * self._page_size))
            sampling = structs.replace(SAMPLINGS[number % len(SAMPLINGS)], max_tokens=new)
            requests.append(self._request(f"chunk {number}", prompt, sampling, adapter if number % 3 == 1 else 0))
        return Wave(replace(config, chunked_prefill_size=chunk if config.chunked_prefill_size > 0 else 0), requests)

    def _prompts(self, config: SchedulerConfig, context: int, sizes: Sequence[int], most: int) -> Wave:
        """Return prompts that are computed one by one: a step for each of the piecewise graphs, full, and one padded."""
        requests, left = list[Submit](), self._pages
        for smaller, size in pairwise((0, *sizes)):
            for prompt in sorted({min(length, most, context - NEW_TOKENS) for length in (smaller + 1, size)}):
                left -= -(-(prompt + NEW_TOKENS) // self._page_size) + 1
                if prompt < 1 or left < 0:
                    break
                sampling = structs.replace(SAMPLINGS[len(requests) % 2], max_tokens=NEW_TOKENS)
                requests.append(self._request(f"prompt {len(requests)} of {prompt} tokens", prompt, sampling, 0))
        return Wave(replace(config, chunked_prefill_size=0, prefill_max_requests=1, enable_mixed_chunk=False), requests)

    def _repetitions(self, config: SchedulerConfig, context: int) -> Wave:
        """Return prompts and answers of two tokens each, from which n-grams are drafted: the other prompts do not repeat themselves."""
        prompt, requests, left = max(1, min(REPETITIONS, context - NEW_TOKENS)), list[Submit](), self._pages
        while len(requests) < 3 and (left := left - -(-(prompt + NEW_TOKENS) // self._page_size) - 1) >= 0:
            number = len(requests)
            pair = tuple(self._random.sample(range(self._runner.loaded.vocabulary_size), 2))
            new = max(1, min(NEW_TOKENS, context - prompt))
            sampling = structs.replace(SAMPLINGS[number % 2], max_tokens=new, allowed_token_ids=pair)
            requests.append(self._request(f"repetition {number}", prompt, sampling, 0, pair))
        return Wave(config, requests)

    def _request(self, name: str, length: int, sampling: Sampling, adapter: int, among: Sequence[int] = ()) -> Submit:
        vocabulary = range(self._runner.loaded.vocabulary_size)
        if sampling.temperature > 0 and not sampling.allowed_token_ids:
            sampling = structs.replace(sampling, allowed_token_ids=tuple(self._random.sample(vocabulary, min(2, len(vocabulary)))))
        among = among or vocabulary
        tokens = array("I", [among[self._random.randrange(len(among))] for _ in range(length)])
        return Submit(f"trial, {name}", tokens.tobytes(), sampling, 0, adapter=adapter)
