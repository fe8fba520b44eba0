"""Sampling by one kernel of the device for all rows of a step (`kernel.py`), for which the host never waits.

`sampler.choose` defines what is chosen. Without Triton it also computes it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from fairlead_worker.kernels.transfer import to_device, to_host
from fairlead_worker.sampling.bad_words import forbidden_tokens
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.noise import uniform
from fairlead_worker.sampling.penalties import bias_of, history_of
from fairlead_worker.sampling.token_arrays import early_stops, token_array
from fairlead_worker.scheduler.request import Request

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Chooses tokens [rows] int64 from logits [rows, vocabulary], which are the same afterwards. Also returns for each mask whether it leaves
no token, [masks] bool.

parameters [rows, 14] float64: temperature (0: greedy), top_k, top_p, log(min_p), repetition, frequency and presence penalty, noise, where
the row's edits begin and where its biases, history, stop tokens and bad words end, and its mask (-1: none). ids [edits] int32: tokens whose
logits change. numbers [edits] float32: a bias, or a count in the output. words [masks, words] int32, as `Masks.words`.
"""
TINY = float(np.finfo(np.float32).tiny)
"""The least temperature: 1e-50 is greater than 0 for the client and 0 in float32."""
NONE = np.zeros(0, np.int64), np.zeros(0, np.float32)


class FusedSampler:
    """Chooses the tokens of a step with one kernel."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def choose(
        self, logits: torch.Tensor, requests: Sequence[Request], ahead: Sequence[Sequence[int]], masks: Masks | None
    ) -> torch.Tensor:
        """Choose tokens [rows] int64 as `sampler.choose`, without thinking budgets."""
        vocabulary, device = logits.shape[1], logits.device
        parameters = np.empty((len(requests), 14))
        parameters[:, :8] = [_constants(request, vocabulary) for request in requests]
        changed = np.flatnonzero(parameters[:, 7]).tolist()
        lists = [_edits(requests[row], ahead[row] if ahead else (), vocabulary) for row in changed]
        edits = [edit for row in lists for edit in row if len(edit[0])]
        lengths = np.zeros((len(requests), 4), np.int64)
        lengths[changed] = [[len(ids) for ids, _ in row] for row in lists] or np.zeros((0, 4))
        ends = lengths.cumsum().reshape(-1, 4)
        words, mask_of = _masks(requests, changed, masks, vocabulary)
        positions = [len(request.tokens) + (len(ahead[row]) if ahead else 0) for row, request in enumerate(requests)]
        parameters[:, 7] = uniform([request.sampling.seed for request in requests], positions)
        parameters[:, 8] = ends[:, 0] - lengths[:, 0]
        parameters[:, 9:13], parameters[:, 13] = ends, -1
        parameters[list(mask_of), 13] = list(mask_of.values())
        ids, numbers = (np.concatenate([edit[part] for edit in edits] or [np.zeros(0)]) for part in (0, 1))
        parts = (parameters, ids.astype(np.int32), numbers.astype(np.float32), words.view(np.int32))
        tokens, dead = self.launch(logits, *(to_device(torch.from_numpy(part), device) for part in parts))
        if masks is not None and masks.places:
            masks.tell(to_host(dead[: len(masks.places)]))
        return tokens


def _constants(request: Request, vocabulary: int) -> tuple[float, ...]:
    """Return the first seven parameters of a request, and whether it changes logits or allows some tokens alone."""
    found: tuple[float, ...] | None = request.sampler_state.get("constants")
    if found is None:
        s = request.sampling
        temperature = max(s.temperature, TINY) if s.temperature > 0 else 0.0
        top_k = s.top_k if 0 < s.top_k < vocabulary else vocabulary
        with np.errstate(divide="ignore"):
            least = float(np.log(np.float32(s.min_p)))
        penalties = (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
        found = (temperature, top_k, s.top_p, least, *penalties, s.changes_logits or bool(s.bad_words) or s.min_tokens > 0)
        request.sampler_state["constants"] = found
    return found


def _edits(request: Request, draft: Sequence[int], vocabulary: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return tokens whose logits change and a number for each: biases, counts in the output, and those that are forbidden.

    The last list is of bad words, which are allowed where nothing else is left. It names no token twice.
    """
    sampling = request.sampling
    stops = early_stops(request, len(draft), vocabulary)
    words = np.unique(forbidden_tokens(request, draft, vocabulary)) if sampling.bad_words else NONE[0]
    return [
        bias_of(request, vocabulary) if sampling.logit_bias else NONE,
        history_of(request).followed_by(draft) if sampling.has_penalties else NONE,
        *((tokens, np.zeros(len(tokens), np.float32)) for tokens in (stops, words)),
    ]


def _masks(requests: Sequence[Request], changed: Sequence[int], masks: Masks | None, vocabulary: int) -> tuple[np.ndarray, dict[int, int]]:
    """Return words [masks, words] of the grammars, in their order, and of `changed` rows with `allowed_token_ids`; and each row's mask."""
    places = [] if masks is None else masks.places
    row_of = {place: row for row, place in enumerate(places)}
    listed = [row for row in changed if requests[row].sampling.allowed_token_ids]
    row_of |= {row: len(row_of) + number for number, row in enumerate(row for row in listed if row not in row_of)}
    words = np.zeros((len(row_of), -(-vocabulary // 32)), np.uint32)
    if masks is not None:
        width = min(words.shape[1], masks.words.shape[1])
        words[: len(places), :width] = masks.words[:, :width]
    for row in listed:
        allowed = np.zeros(words.shape[1] * 32, np.bool_)
        allowed[token_array(requests[row], "allowed", requests[row].sampling.allowed_token_ids, vocabulary)] = True
        bits = np.packbits(allowed, bitorder="little").view(np.uint32)
        words[row_of[row]] = words[row_of[row]] & bits if row in places else bits
    return words, row_of
