"""Runs the steps of an encoder: whole texts, packed, and one vector for each."""

import time

import torch
from torch.nn.functional import normalize

from fairlead_worker.model.encoder import LoadedEncoder
from fairlead_worker.model.layers.texts import PackedTexts
from fairlead_worker.scheduler.plan import StepPlan, StepResult


class EncoderRunner:
    """Implements `scheduler.plan.Runner`. Rows hold whole texts; their pages are not used, because an encoder has no KV."""

    grammars: None = None
    """An encoder generates nothing."""

    def __init__(self, loaded: LoadedEncoder) -> None:
        self.loaded = loaded

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the embedding or the logits of each text."""
        began, loaded = time.perf_counter(), self.loaded
        if not plan:
            return StepResult([])
        requests = sorted((row.request for row in plan.rows), key=lambda request: len(request.tokens))  # equal lengths form runs
        seconds = [request.submit.second if loaded.has_types else 0 for request in requests]
        texts = PackedTexts.pack([request.tokens for request in requests], seconds, loaded.device)
        states = loaded.model(texts)
        if loaded.classifier is not None:
            vectors = loaded.model.classify(states, texts).float()
        else:
            vectors = normalize(texts.pool(states, loaded.pooling.kind or "mean"), dim=1)
        pooled = dict(zip((request.id for request in requests), map(_to_bytes, vectors.cpu()), strict=True))
        return StepResult([], seconds=time.perf_counter() - began, pooled=pooled)


def _to_bytes(vector: torch.Tensor) -> bytes:
    data: bytes = vector.numpy().tobytes()
    return data
