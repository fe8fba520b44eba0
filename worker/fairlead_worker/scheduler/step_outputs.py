"""The outputs of one step, and the tokens that a request takes from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fairlead_index.hashing import token_bytes
from fairlead_worker.ipc.messages import Output, TokenLogprobs
from fairlead_worker.scheduler.request import Request


@dataclass(slots=True)
class StepOutputs:
    """The outputs of one step. Decodes that got one token and continue, which are nearly all, are stored in columns without an `Output`
    object each."""

    full: list[Output] = field(default_factory=list)
    """Outputs with more than one plain token, in the order of the plan's rows that sample."""
    decoded: list[Request] = field(default_factory=list)
    """Requests that got one plain token, in the same order."""
    tokens: list[int] = field(default_factory=list)
    """One token for each request in `decoded`."""

    def __len__(self) -> int:
        return len(self.full) + len(self.decoded)

    def __iter__(self) -> Iterator[Output]:
        for request, token in zip(self.decoded, self.tokens, strict=True):
            yield Output(request.id, token_bytes((token,)), request.history.reported_cached)
        yield from self.full


def append_tokens(request: Request, tokens: Sequence[int], logprobs: tuple[TokenLogprobs, ...], end_reason: str | None = None) -> Output:
    """Append sampled tokens until one ends the request. Only this function decides how a request finishes by its tokens.

    `end_reason`: not None if the grammar ends after these tokens. A non-empty value is the reason of a failure.
    """
    known, stop_tokens, history, taken = request.tokens, request.stop_tokens, request.history, 0
    stop_token: int | None = None
    for token in tokens:
        known.append(token)
        taken += 1
        if token in stop_tokens and len(known) - request.prompt_length >= request.sampling.min_tokens:
            request.finish, stop_token = "stop", token
            break
        if len(known) >= request.length_limit:
            request.finish = "length"
            break
    if end_reason is not None and taken == len(tokens) and stop_token is None:
        request.finish = "error" if end_reason else "stop"
    history.awaiting_first_token = history.awaiting_first_token and not taken
    is_last = request.finish is not None
    return Output(
        request.id,
        token_bytes(tokens[:taken]),
        history.reported_cached,
        request.finish,
        stop_token,
        end_reason or "",
        logprobs[:taken],
        None,
        request.take_prompt_logprobs(),
        computed_tokens=len(known) - 1 - history.reported_cached if is_last else 0,
        mask_seconds=request.mask_seconds if is_last else 0.0,
    )
