"""The waits that a step may have, each with its reason. Any other wait fails the tests."""

from tests.worker.fake_gpu.device.record import Record, Wait

STEP: dict[tuple[str, str], str] = {
    ("copy to the host", "sampling/sampler.py:sample"): "the plain loop reads a step's tokens",
    ("event synchronize", "kernels/transfer.py:wait"): "log-probabilities, masks, drafts and overlapped tokens: waits for their copy only",
    (
        "event synchronize",
        "kernels/flashinfer.py:_stage",
    ): "waits until the last plan has left FlashInfer's pinned memory",
    ("copy to the host", "sampling/sampler.py:read"): "log-probabilities that are on the host already",
}
TORCH_FILTERS = {
    ("copy to the host", "sampling/draw.py:draw"): "top_p without top_k and without the kernel: are its tokens among the 1,024 likeliest?"
}
SCORE = {
    ("copy to the host", "execution/scoring.py:_score_block"): "prompt log-probabilities go to the client",
    ("copy to the host", "execution/pooling.py:pool"): "one copy of all embeddings",
}


def unexpected(record: Record, *further: dict[tuple[str, str], str]) -> list[Wait]:
    """Return the waits that are not in `STEP` or in `further`."""
    allowed = {key for table in (STEP, *further) for key in table}
    return [wait for wait in record.waits if (wait.what, wait.site) not in allowed]
