"""Penalties, logit bias and allowed tokens, which change logits before temperature. Order as in vLLM: bias, penalties, allowed tokens.

Penalties need a request's distinct tokens and their counts. They are kept sparse and grow with the request, so a step costs one
dictionary look-up for each new token, and arrays as long as the distinct tokens instead of the vocabulary.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.sampling.token_arrays import index_of, token_array
from fairlead_worker.scheduler.request import Request

_ROOM = 64
"""Free places of a new history; it doubles when they are used up."""


class History:
    """The distinct tokens of one request, in order of appearance, and the count of each in its output."""

    def __init__(self, request: Request) -> None:
        self.tokens: array[int] = request.tokens
        """The request's own array, which only grows."""
        prompt = np.unique(np.frombuffer(self.tokens[: request.prompt_length], np.uint32)).astype(np.int64)
        self._seen = request.prompt_length
        self._place = {token: place for place, token in enumerate(prompt.tolist())}
        self._ids = np.concatenate([prompt, np.zeros(_ROOM, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)

    def followed_by(self, draft: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return `ids` and `counts` as if these tokens followed the request's own."""
        if not draft:
            return self.ids, self.counts
        new = [token for token in dict.fromkeys(draft) if token not in self._place]
        ids = np.concatenate([self.ids, np.array(new, np.int64)])
        counts = np.concatenate([self.counts, np.zeros(len(new), np.float32)])
        places = {token: len(self._place) + place for place, token in enumerate(new)}
        for token in draft:
            counts[self._place.get(token, places.get(token, 0))] += 1
        return ids, counts

    def catch_up(self) -> None:
        """Add the tokens that came since the last call."""
        for token in self.tokens[self._seen :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._seen = len(self.tokens)

    @property
    def ids(self) -> np.ndarray:
        """[distinct] int64: tokens of prompt and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """[distinct] float32: count of each token in the output; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._place)]


def adjust(logits: torch.Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """Return logits [rows, vocabulary] float32 with each row's bias, penalties and allowed tokens; the same tensor if no row sets any.

    `ahead`: drafted tokens between each row's request and its logits, which count as its own; empty: no drafts.
    """
    rows = [(i, request) for i, request in enumerate(requests) if request.sampling.changes_logits]
    if not rows:
        return logits
    logits = logits.clone()
    _bias(logits, [(i, request) for i, request in rows if request.sampling.logit_bias])
    penalized = [(i, request) for i, request in rows if request.sampling.has_penalties]
    _penalize(logits, penalized, [ahead[i] if ahead else () for i, _ in penalized])
    _allow(logits, [(i, request) for i, request in rows if request.sampling.allowed_token_ids])
    return logits


def _penalize(logits: torch.Tensor, rows: Sequence[tuple[int, Request]], ahead: Sequence[Sequence[int]]) -> None:
    """Apply penalties in place, at the distinct tokens of all rows together."""
    if not rows:
        return
    device = logits.device
    histories = [history_of(request).followed_by(draft) for (_, request), draft in zip(rows, ahead, strict=True)]
    lengths = [len(ids) for ids, _ in histories]
    counts = to_device(torch.from_numpy(np.concatenate([counts for _, counts in histories])), device)
    settings = [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in (request.sampling for _, request in rows)]
    repetition, frequency, presence = to_device(torch.from_numpy(np.repeat(np.array(settings, np.float32), lengths, 0)), device).unbind(1)
    index = index_of([i for i, _ in rows], [ids for ids, _ in histories], device)
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[index] = values - frequency * counts - presence * (counts > 0)


def history_of(request: Request) -> History:
    """Return the history of a request up to its last token."""
    history: History | None = request.sampler_state.get("history")
    if history is None:
        history = request.sampler_state["history"] = History(request)
    history.catch_up()
    return history


def _bias(logits: torch.Tensor, rows: Sequence[tuple[int, Request]]) -> None:
    """Add biases in place. Tokens outside the vocabulary are ignored."""
    if not rows:
        return
    vocabulary, device = logits.shape[1], logits.device
    biases = [bias_of(request, vocabulary) for _, request in rows]
    index = index_of([i for i, _ in rows], [tokens for tokens, _ in biases], device)
    logits[index] += to_device(torch.from_numpy(np.concatenate([values for _, values in biases])), device)


def bias_of(request: Request, vocabulary: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the biased tokens below `vocabulary`, int64 [tokens], and their biases, float32 [tokens]."""
    found: tuple[np.ndarray, np.ndarray] | None = request.sampler_state.get("bias")
    if found is None:
        pairs = [(token, value) for token, value in request.sampling.logit_bias if token < vocabulary]
        found = np.array([token for token, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float32)
        request.sampler_state["bias"] = found
    return found


def _allow(logits: torch.Tensor, rows: Sequence[tuple[int, Request]]) -> None:
    """Set every token of these rows except the allowed ones to -inf, in place."""
    if not rows:
        return
    vocabulary, device = logits.shape[1], logits.device
    allowed = [token_array(request, "allowed", request.sampling.allowed_token_ids, vocabulary) for _, request in rows]
    index = index_of([i for i, _ in rows], allowed, device)
    kept = logits[index]
    logits[to_device([i for i, _ in rows], device)] = float("-inf")
    logits[index] = kept
