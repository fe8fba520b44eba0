"""Harness of the exactness suite: transformers' own `generate`, and the real scheduler, cache and runner."""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from tests.models import VOCABULARY
from transformers import PreTrainedModel

from fairlead_index.hashing import extend
from fairlead_worker.cache.make import make_cache
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.execution.forward import Forward, HiddenStates
from fairlead_worker.execution.host import PlainHostStore
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Output, PoolingKind, Sampling, Submit
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.kernels.groups import cache_groups
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.scheduler import Scheduler

NEW_TOKENS = 20
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129, 200, 333, 512, 777, 1200, 2000)
"""Lengths around pages of 16 tokens, around windows of 48 and 100, and long ones."""
SHORT_LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 100, 129, 200, 333)
"""Twenty too, around the blocks of 32 tokens that have snapshots of states as well."""


def make_prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Return random prompts of `lengths`. Every third one begins as the one before it, so that a batch shares prefixes."""
    chooser = random.Random(11)
    prompts: list[list[int]] = []
    for index, length in enumerate(lengths):
        prompt = [chooser.randrange(2, VOCABULARY) for _ in range(length)]
        if index % 3 == 2:
            shared = prompts[index - 1][: length * 3 // 4]
            prompt[: len(shared)] = shared
        prompts.append(prompt)
    return prompts


def generate(model: PreTrainedModel, prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return greedy NEW_TOKENS of each prompt alone, by transformers with its own attention and KV cache."""
    return [
        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def confirm_greedy(model: PreTrainedModel, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> None:
    """Assert that `outputs` are transformers' greedy tokens: each is the most likely one after its prompt and the tokens before it.

    By induction that is what greedy decoding says. One pass for a prompt takes its place, where `generate` takes one for each token.
    """
    for prompt, tokens in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
        assert logits.argmax(-1).tolist() == tokens and len(tokens) == NEW_TOKENS, f"the prompt of {len(prompt)} tokens"


@dataclass
class Counted:
    """A forward that records the number of tokens of each pass."""

    inner: Forward
    tokens: list[int]

    @property
    def can_score(self) -> bool:
        return self.inner.can_score

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        self.tokens.append(len(step.tokens))
        return self.inner(step, context)

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        self.tokens.append(len(step.tokens))
        return self.inner.score(step, context, places)


@dataclass
class Engine:
    """A model behind the real scheduler, stepped by hand."""

    loaded: LoadedModel
    chunk: int
    pages: int = 1024
    page_size: int = 16
    settings: dict[str, float] = field(default_factory=dict)
    """Of the scheduler. If they name a policy, the requests have several priorities and tenants."""
    backend: str = "auto"
    host_slots: int = 0
    """Pages of a host tier, with the CPU in the role of the device."""
    draft: LoadedModel | None = None
    native_decoder: bool = True
    adapters: AdapterSet | None = None
    deterministic: bool = False
    snapshots: int = 0
    """Of recurrent states; 0: plenty."""
    prefix_cache: bool = True
    """False: each request has a root of its own, so that none shares KV."""

    def __post_init__(self) -> None:
        self.runner: ModelRunner = RunnerBuilder(
            loaded=self.loaded,
            page_size=self.page_size,
            kv_pages=self.pages,
            backend=self.backend,
            draft=self.draft,
            native_decoder=self.native_decoder,
            adapters=self.adapters,
            deterministic=self.deterministic,
            state_snapshots=self.snapshots,
            host_kv_cache_bytes=self.host_slots,  # not made on a CPU; see below
        ).build()
        cache = make_cache(
            PagePool(self.runner.backend.pages, self.page_size),
            2 * self.page_size,
            extend,
            host_slots=self.host_slots,
            groups=cache_groups(self.runner.backend.spec, self.loaded.max_model_len),
            chunk_tokens=max(self.chunk, self.page_size) if self.chunk > 0 else 0,
            states=self.runner.state_slots,
        )
        config = SchedulerConfig(self.loaded.max_model_len, chunked_prefill_size=self.chunk, **self.settings)  # type: ignore[arg-type]  # each setting has its field's type
        self.scheduler = Scheduler(config, cache)
        if self.host_slots:
            self.runner.host = PlainHostStore(self.runner.backend, self.host_slots)
        self.forwards: list[int] = []
        """Tokens of each pass of the model (not of a draft model)."""
        self.scored: list[int] = []
        """Number of tokens with log-probabilities for each prompt of the latest `serve`."""
        self.runner.forward = Counted(self.runner.forward, self.forwards)
        self.submitted = 0
        self.mixed_steps = 0
        """Steps with both a chunk and decodes."""

    def serve(self, prompts: Sequence[list[int]], root: int = 0, adapters: Sequence[int] = (), **sampling: float | None) -> list[list[int]]:
        """Submit all prompts together and step to the end; return their output tokens, in order. `adapters`: of each prompt."""
        return [tokens for tokens, _ in self.serve_counted(prompts, root, adapters, **sampling)]

    def serve_counted(
        self, prompts: Sequence[list[int]], root: int = 0, adapters: Sequence[int] = (), **sampling: float | None
    ) -> list[tuple[list[int], int]]:
        """As `serve`, with each prompt's cached tokens."""
        answers = self.outputs(prompts, root, adapters, **sampling)
        self.scored = [sum(len(output.prompt_logprobs) for output in outputs) for outputs in answers]
        return [(array("I", b"".join(output.tokens for output in outputs)).tolist(), outputs[-1].cached_tokens) for outputs in answers]

    def outputs(
        self,
        prompts: Sequence[list[int]],
        root: int = 0,
        adapters: Sequence[int] = (),
        pooling: Sequence[PoolingKind | None] = (),
        **sampling: float | None,
    ) -> list[list[Output]]:
        """As `serve`, with all results of each prompt. `pooling`: of the prompts whose hidden states are wanted."""
        defaults = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
        settings = Sampling(**(defaults | sampling))  # type: ignore[arg-type]  # as above
        names = [str(self.submitted + i) for i in range(len(prompts))]
        self.submitted += len(prompts)
        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            priority, tenant = (number % 3, f"tenant {number % 2}") if "policy" in self.settings else (0, "")
            adapter = adapters[number] if adapters else 0
            submit = Submit(
                name,
                array("I", prompt).tobytes(),
                settings,
                root + adapter if self.prefix_cache else 1 + int(name),
                priority,
                tenant,
                adapter,
                pooling=pooling[number] if pooling else None,
            )
            refused = self.scheduler.submit(submit)
            assert refused is None, refused
        answers: dict[str, list[Output]] = {name: [] for name in names}
        while plan := self.scheduler.plan():
            self.mixed_steps += any(row.count > 1 for row in plan.rows) and any(row.count == 1 for row in plan.rows)
            for output in self.scheduler.advance(plan, self.runner.execute(plan)):
                assert output.finish in (None, "stop" if output.embedding else "length"), output
                answers[output.id].append(output)
        assert self.scheduler.idle
        return list(answers.values())
