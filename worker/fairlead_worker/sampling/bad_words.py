"""Bad words: token sequences that must not occur in an output. The token that would complete one is forbidden, as in vLLM."""

from collections.abc import Iterator, Sequence

import torch

from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.scheduler.request import Request


def forbid_words(logits: torch.Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """Return logits [rows, vocabulary] with -inf where a token would complete one of its request's `bad_words`.

    `ahead`: drafted tokens between each row's request and its logits; empty: no drafts. A row in which no other token remains is
    unchanged: a bad word is better than no token.
    """
    vocabulary = logits.shape[1]
    forbidden = [
        (row, token)
        for row, request in enumerate(requests)
        if request.sampling.bad_words
        for token in _completing_tokens(request, ahead[row] if ahead else ())
        if token < vocabulary
    ]
    if not forbidden:
        return logits
    rows, tokens = to_device(torch.tensor(forbidden).T, logits.device)
    kept = logits.index_put((rows, tokens), logits.new_full((), float("-inf")))
    return torch.where((kept.amax(1) == float("-inf"))[:, None], logits, kept)


def _completing_tokens(request: Request, draft: Sequence[int]) -> Iterator[int]:
    """Yield the last tokens of the sequences whose other tokens end the output. The prompt does not count."""
    words = request.sampling.bad_words
    longest = max(map(len, words)) - 1
    begin = max(request.prompt_length, len(request.tokens) - longest)
    output = (*request.tokens[begin:], *draft)
    for *before, last in words:
        if not before or output[-len(before) :] == tuple(before):
            yield last
