"""Bad words: token sequences that must not occur in an output. The token that would complete one is forbidden, as in vLLM."""

from collections.abc import Sequence

import numpy as np
import torch

from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.sampling.token_arrays import index_of, token_array
from fairlead_worker.scheduler.request import Request


def forbid_words(logits: torch.Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """Return logits [rows, vocabulary] with -inf where a token would complete one of its request's `bad_words`.

    `ahead`: drafted tokens between each row's request and its logits; empty: no drafts. A row in which no other token remains is
    unchanged: a bad word is better than no token.
    """
    vocabulary = logits.shape[1]
    rows = [row for row, request in enumerate(requests) if request.sampling.bad_words]
    forbidden = [forbidden_tokens(requests[row], ahead[row] if ahead else (), vocabulary) for row in rows]
    if not any(map(len, forbidden)):
        return logits
    kept = logits.index_put(index_of(rows, forbidden, logits.device), logits.new_full((), float("-inf")))
    at = to_device(rows, logits.device)
    none_left = (kept[at].amax(1) == float("-inf"))[:, None]
    return kept.index_put((at,), torch.where(none_left, logits[at], kept[at]))


def forbidden_tokens(request: Request, draft: Sequence[int], vocabulary: int) -> np.ndarray:
    """Return the words of one token, and the last tokens of the others whose other tokens end the output. The prompt does not count."""
    words = request.sampling.bad_words
    single = token_array(request, "bad words", (word[0] for word in words if len(word) == 1), vocabulary)
    if len(single) == len(words):
        return single
    longest = max(map(len, words)) - 1
    begin = max(request.prompt_length, len(request.tokens) - longest)
    output = (*request.tokens[begin:], *draft)
    completed = [word[-1] for word in words if len(word) > 1 and output[1 - len(word) :] == word[:-1] and word[-1] < vocabulary]
    return np.concatenate([single, np.array(completed, np.int64)]) if completed else single
