"""One forward pass: a step plan in, tokens out."""

import time

import torch

from fairlead_worker.engine.plan import StepPlan, StepResult
from fairlead_worker.execution.adjust import Histories
from fairlead_worker.execution.host import HostStore, make_host_store
from fairlead_worker.execution.memory import kv_budget
from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.sampler import sample
from fairlead_worker.execution.scoring import score
from fairlead_worker.kernels.base import Backend, KVSpec
from fairlead_worker.kernels.registry import make_backend
from fairlead_worker.messages import TokenLogprobs
from fairlead_worker.model.head import find_head
from fairlead_worker.model.loader import LoadedModel


class ModelRunner:
    """Runs steps of a loaded model on an attention backend. Implements `engine.plan.Runner`."""

    def __init__(self, loaded: LoadedModel, backend: Backend, host: HostStore | None = None) -> None:
        self.loaded = loaded
        self.backend = backend
        self.host = host
        """KV of the host tier; None without one."""
        self.histories = Histories()
        self.head = find_head(loaded.model)
        """None: prompts cannot be scored."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, write their KV, and choose a token for each row that samples."""
        began = time.perf_counter()
        if not plan:
            return StepResult([])
        requests = [row.request for row in plan.rows if row.samples]
        with torch.inference_mode():
            if self.host is not None:
                self.host.copy(plan.saves, plan.loads)
            logits, scores = self._score(plan) if plan.scores else (self.logits(plan), [])
            tokens, logprobs = sample(logits, requests, self.histories)
        return StepResult([[token] for token in tokens], logprobs, time.perf_counter() - began, scores)

    def _score(self, plan: StepPlan) -> tuple[torch.Tensor, list[tuple[TokenLogprobs, ...]]]:
        """As `logits`, and of each row the log-probabilities of its prompt's tokens; for these the head runs a block at a time."""
        head = self.head
        assert head is not None, "the scheduler was told"
        with head.kept() as answers:
            logits = self.logits(plan)
        return logits, score(plan, lambda places: head.logits(answers[0], places.to(self.loaded.device)), self.loaded.vocabulary_size)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """[sampling rows, vocabulary]: the head runs on the last token of the sampling rows only."""
        step = pack(plan, self.backend.spec.page_size, self.loaded.device)
        output = self.loaded.model(
            input_ids=step.tokens[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=step.sampling,
            step=self.backend.plan(step),
        )
        logits: torch.Tensor = output.logits[0]
        return logits


def make_runner(
    loaded: LoadedModel, *, page_size: int, backend: str = "auto", kv_pages: int = 0, kv_cache_bytes: int = 0, host_kv_cache_bytes: int = 0
) -> ModelRunner:
    """A runner with KV storage of `kv_pages` pages; 0: as many as `kv_cache_bytes` hold; 0 as well: a share of the free memory.

    `host_kv_cache_bytes`: of the host tier, see `make_host_store`. ValueError where not even one page fits, or the backend is unknown.
    """
    spec = KVSpec(loaded.layers, page_size, loaded.dtype, loaded.device)
    pages = kv_pages or spec.pages_for(kv_cache_bytes or kv_budget(loaded.device))
    if pages < 1:
        raise ValueError(
            f"no memory for KV: one page of {page_size} tokens takes {spec.page_bytes} bytes; raise --kv-cache-bytes or free memory"
        )
    made = make_backend(backend, spec, pages)
    return ModelRunner(loaded, made, make_host_store(made, host_kv_cache_bytes))
