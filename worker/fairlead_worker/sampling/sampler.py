"""Sampler: choose each sampling row's next token from its logits, and report log-probabilities on request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.kernels.transfer import to_device, to_host
from fairlead_worker.sampling.bad_words import forbid_words
from fairlead_worker.sampling.blocks import largest
from fairlead_worker.sampling.draw import draw
from fairlead_worker.sampling.fused import FusedSampler
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.noise import uniform
from fairlead_worker.sampling.penalties import adjust
from fairlead_worker.sampling.thinking import force
from fairlead_worker.sampling.token_arrays import early_stops, index_of
from fairlead_worker.scheduler.request import Request


def sample(
    logits: torch.Tensor,
    requests: Sequence[Request],
    ahead: Sequence[Sequence[int]] = (),
    masks: Masks | None = None,
    fused: FusedSampler | None = None,
) -> tuple[list[int], list[tuple[TokenLogprobs, ...]]]:
    """Return one token per row of logits [rows, vocabulary], and its log-probabilities.

    A row without requested log-probabilities has an empty tuple; the list is empty if no row requests any. A row's token depends only
    on its own logits, sampling settings and tokens, not on the other rows.

    `ahead`: for each row, the drafted tokens between its request's own and its logits; empty: no drafts. A request with a draft has a
    row for each of its positions, and each is chosen as if the draft before it were its text.

    `masks`: for rows whose requests have a grammar. It records which of them have no token left. `fused`: the kernel of the
    device that makes the same choices; None: torch.
    """
    if not requests:
        return [], []
    if fused is None and all(request.plain for request in requests):  # fast path: no row has any setting
        return largest(logits).tolist(), []
    tokens = choose(logits, requests, ahead, masks, fused)
    asked = gather_logprobs(logits, tokens, requests)
    return tokens.tolist(), [] if asked is None else asked.fetch()()


def choose(
    logits: torch.Tensor,
    requests: Sequence[Request],
    ahead: Sequence[Sequence[int]] = (),
    masks: Masks | None = None,
    fused: FusedSampler | None = None,
) -> torch.Tensor:
    """Choose tokens as `sample`: [rows] int64 on the logits' device, for at least one row."""
    if fused is not None:
        return force(fused.choose(logits, requests, ahead, masks), requests, ahead)
    if all(request.plain for request in requests):  # no copy, not even to float32
        return largest(logits)
    changed = [i for i, request in enumerate(requests) if not request.plain]
    chosen_by = [requests[i] for i in changed]
    further = [len(ahead[i]) if ahead else 0 for i in changed]
    own = (logits if len(changed) == len(requests) else logits[to_device(changed, logits.device)]).float()
    drafted = [ahead[i] for i in changed] if ahead else ()
    adjusted = _forbid_early_stops(adjust(own, chosen_by, drafted), chosen_by, further)
    if masks is not None:
        adjusted = masks.apply(adjusted, changed)
    # After the masks: a bad word is allowed if it is the only token that the requested format allows.
    adjusted = forbid_words(adjusted, chosen_by, drafted)
    random = [i for i, request in enumerate(chosen_by) if request.sampling.temperature > 0]
    if len(random) < len(changed):
        choice = largest(adjusted)
    if random:
        settings = [chosen_by[i].sampling for i in random]
        positions = [len(chosen_by[i].tokens) + further[i] for i in random]
        noise = to_device(torch.from_numpy(uniform([each.seed for each in settings], positions)), logits.device)
        if len(random) == len(changed):
            choice = draw(adjusted, settings, noise)
        else:
            index = to_device(random, logits.device)
            choice[index] = draw(adjusted[index], settings, noise)
    if len(changed) == len(requests):
        tokens = choice
    else:
        tokens = largest(logits)
        tokens[to_device(changed, logits.device)] = choice
    # Last: the end of the reasoning precedes every other rule of the request.
    return force(tokens, requests, ahead)


def _forbid_early_stops(logits: torch.Tensor, requests: Sequence[Request], further: Sequence[int]) -> torch.Tensor:
    """Forbid rows short of `min_tokens` the tokens that would end them."""
    tokens = [early_stops(request, more, logits.shape[1]) for request, more in zip(requests, further, strict=True)]
    if not any(map(len, tokens)):
        return logits
    return logits.index_put(index_of(range(len(tokens)), tokens, logits.device), logits.new_full((), float("-inf")))


Fetch = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Starts a copy of a tensor to the host and returns a function that waits for it, like `to_host`."""


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities on the device."""

    rows: int
    wanted: Sequence[tuple[int, int]]
    """Row, and how many of its likeliest tokens are reported."""
    chosen: torch.Tensor
    """[wanted]"""
    ids: torch.Tensor
    """[wanted, most]"""
    top: torch.Tensor

    def fetch(self, fetch: Fetch = to_host) -> Callable[[], list[tuple[TokenLogprobs, ...]]]:
        """Start copying to the host by `fetch`. The returned function waits for that and returns each row's log-probabilities.

        Rows that request none have an empty tuple.
        """
        parts = [fetch(part) for part in (self.chosen, self.ids, self.top)]

        def read() -> list[tuple[TokenLogprobs, ...]]:
            answer: list[tuple[TokenLogprobs, ...]] = [()] * self.rows
            values = [part().tolist() for part in parts]
            for (i, count), value, row_ids, row_top in zip(self.wanted, *values, strict=True):
                answer[i] = (TokenLogprobs(value, tuple(row_ids[:count]), tuple(row_top[:count])),)
            return answer

        return read


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[Request]) -> DeviceLogprobs | None:
    """Return log-probabilities by the model's own distribution: before penalties, bias, temperature, filters and forbidden stops.

    None if no request wants any.
    """
    wanted = [(i, request.sampling.logprobs) for i, request in enumerate(requests) if request.sampling.logprobs is not None]
    if not wanted:
        return None
    rows = to_device([i for i, _ in wanted], logits.device)
    distribution = logits[rows].float().log_softmax(1)
    chosen = distribution.gather(1, tokens[rows, None])[:, 0]
    top, ids = torch.topk(distribution, min(max(count for _, count in wanted), logits.shape[1]))
    return DeviceLogprobs(len(requests), wanted, chosen, ids, top)
