"""A model with a tokenizer behind the real scheduler, grammar queue and grammars, stepped by the test."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from fairlead_index.hashing import extend, tokens_from_bytes
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.grammar_queue import GrammarQueue
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.compiler import Compiler
from fairlead_worker.grammar.constraint import Constraint, Kind
from fairlead_worker.ipc.messages import Output, Sampling, Submit, TokenLogprobs
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.sampling.grammars import Grammars
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler


@dataclass
class Model:
    """A model folder with its tokenizer and compiler."""

    folder: Path
    loaded: LoadedModel = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    compiler: Compiler = field(init=False)

    def __post_init__(self) -> None:
        self.loaded = load_model(f"file://{self.folder}", dtype="float32", device="cpu")
        text = (self.folder / "tokenizer.json").read_text()
        self.tokenizer = Tokenizer.from_str(text)
        self.compiler = Compiler(text, self.loaded.vocabulary_size, self.loaded.eos_token_ids)

    def grammar(self, kind: Kind, text: str | object) -> str:
        """Return the grammar as the checker does."""
        written = text if isinstance(text, str) else msgspec.json.encode(text).decode()
        verdict = check(self.compiler, Constraint(kind, written, "test"))
        assert not verdict.error, verdict.error
        return verdict.grammar

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


@dataclass
class Ask:
    """One request."""

    grammar: str
    prompt: Sequence[int] = (5, 6, 7)
    max_tokens: int = 200
    temperature: float = 1.0
    seed: int = 0
    more: dict[str, object] = field(default_factory=dict)
    """Further fields of `Sampling`."""


@dataclass
class Answer:
    """The result of a request."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_token: int | None = None
    error: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: int = 0
    mask_seconds: float = 0.0

    def take(self, output: Output) -> None:
        assert self.finish is None, "nothing comes after the end"
        self.tokens += tokens_from_bytes(output.tokens)
        self.finish, self.stop_token, self.error = output.finish, output.stop_token, output.error
        self.logprobs += output.logprobs
        self.outputs += 1
        self.mask_seconds += output.mask_seconds


class Serving:
    """One engine. `settings` are the scheduler's."""

    def __init__(
        self,
        model: Model,
        *,
        pages: int = 512,
        draft: LoadedModel | None = None,
        grammars: Grammars | None = None,
        overlap: bool = False,
        **settings: object,
    ) -> None:
        self.model = model
        self.grammars = grammars or Grammars(model.compiler)
        self.runner = RunnerBuilder(loaded=model.loaded, page_size=16, kv_pages=pages, draft=draft, grammars=self.grammars).build()
        config = SchedulerConfig(
            model.loaded.max_model_len,
            eos_token_ids=model.loaded.eos_token_ids,
            prompt_logprobs=self.runner.forward.can_score,
            **settings,  # type: ignore[arg-type]  # each has its field's type
        )
        cache = PrefixCache(PagePool(pages, 16), 32, extend)
        self.scheduler = Scheduler(config, cache)
        self.ahead = OverlapScheduler(self.scheduler) if overlap else None
        self.gate = GrammarQueue(self.scheduler.submit, self.grammars)
        self.steps = 0

    def serve(self, asks: Sequence[Ask]) -> list[Answer]:
        """Run all requests together to their ends."""
        answers = [Answer() for _ in asks]
        for number, ask in enumerate(asks):
            sampling = Sampling(ask.max_tokens, temperature=ask.temperature, seed=ask.seed, **ask.more)  # type: ignore[arg-type]
            message = Submit(str(number), array("I", ask.prompt).tobytes(), sampling, 0, grammar=ask.grammar)
            refused = self.gate.submit(message) if message.grammar else self.scheduler.submit(message)
            if refused is not None:
                answers[number].take(refused)
        overlap = None
        if self.ahead is not None:

            def tell(plan: StepPlan, result: StepResult, outputs: list[Output]) -> None:
                self.steps += 1
                for output in outputs:
                    answers[int(output.id)].take(output)

            overlap = Overlap(self.ahead, OverlappedRunner(self.runner), RequestTimer(), tell)
        while len(self.gate) or not self.scheduler.idle:
            for output in self.gate.submit_ready():
                answers[int(output.id)].take(output)
            if overlap is not None:
                overlap.step()
                continue
            if plan := self.scheduler.plan():
                self.steps += 1
                for output in self.scheduler.advance(plan, self.runner.execute(plan)):
                    answers[int(output.id)].take(output)
        return answers

    def text(self, answer: Answer) -> str:
        """Return the answer's text without the token that ended it."""
        tokens = answer.tokens[:-1] if answer.stop_token is not None else answer.tokens
        return self.model.tokenizer.decode(tokens, skip_special_tokens=False)
