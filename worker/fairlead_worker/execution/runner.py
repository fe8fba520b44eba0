"""One forward pass: a step plan in, tokens out."""

import time

import torch

from fairlead_worker.engine.plan import StepPlan, StepResult
from fairlead_worker.execution.adjust import Histories
from fairlead_worker.execution.forward import choose_forward
from fairlead_worker.execution.memory import kv_budget
from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.sampler import sample
from fairlead_worker.kernels.base import Backend, KVSpec
from fairlead_worker.kernels.registry import make_backend
from fairlead_worker.model.loader import LoadedModel


class ModelRunner:
    """Runs steps of a loaded model on an attention backend. Implements `engine.plan.Runner`."""

    def __init__(self, loaded: LoadedModel, backend: Backend, native_decoder: bool = True) -> None:
        self.loaded = loaded
        self.backend = backend
        self.forward = choose_forward(loaded, backend, native_decoder)
        self.histories = Histories()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's rows, write their KV, and choose a token for each row that samples."""
        began = time.perf_counter()
        if not plan:
            return StepResult([])
        requests = [row.request for row in plan.rows if row.samples]
        with torch.inference_mode():
            tokens, logprobs = sample(self.logits(plan), requests, self.histories)
        return StepResult([[token] for token in tokens], logprobs, time.perf_counter() - began)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """[sampling rows, vocabulary]: the head runs on the last token of the sampling rows only."""
        step = pack(plan, self.backend.spec.page_size, self.loaded.device)
        return self.forward(step, self.backend.plan(step))


def make_runner(
    loaded: LoadedModel,
    *,
    page_size: int,
    backend: str = "auto",
    kv_pages: int = 0,
    kv_cache_bytes: int = 0,
    native_decoder: bool = True,
) -> ModelRunner:
    """A runner with KV storage of `kv_pages` pages; 0: as many as `kv_cache_bytes` hold; 0 as well: a share of the free memory.

    ValueError where not even one request of a page fits, or the backend is unknown.
    """
    spec = KVSpec(loaded.layers, page_size, loaded.dtype, loaded.device)
    pages = kv_pages or spec.pages_for(kv_cache_bytes or kv_budget(loaded.device))
    if pages < 1:
        raise ValueError(
            f"no memory for KV: one page of {page_size} tokens takes {spec.page_bytes} bytes; raise --kv-cache-bytes or free memory"
        )
    return ModelRunner(loaded, make_backend(backend, spec, pages), native_decoder)
