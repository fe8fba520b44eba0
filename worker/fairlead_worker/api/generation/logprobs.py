"""Log-probabilities in the formats of completions and chat completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.ipc.messages import TokenLogprobs

FLOOR = -9999.0
"""JSON has no infinity. vLLM uses the same number."""

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""GPT-2's byte alphabet: printable Latin-1 bytes map to themselves, the other bytes to U+0100 and up."""


def format_chat_logprobs(encoder: PromptEncoder, delta: OutputDelta, by_id: bool = False) -> dict[str, Any] | None:
    """Return `{"content": [{token, bytes, logprob, top_logprobs}], "refusal": null}` for the tokens of a delta.

    `by_id`: write tokens as `token_id:7`.
    """
    if not delta.logprobs:
        return None
    content = [
        _entry(encoder, token, logprobs.chosen, by_id)
        | {
            "top_logprobs": [
                _entry(encoder, other, value, by_id) for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            ]
        }
        for token, logprobs in zip(delta.tokens, delta.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds `{"tokens", "token_logprobs", "top_logprobs", "text_offset"}`. Offsets continue over the deltas of a choice."""

    def __init__(self, encoder: PromptEncoder, by_id: bool = False) -> None:
        self._encoder = encoder
        self._by_id = by_id
        self._offset = 0

    def format_delta(self, delta: OutputDelta) -> dict[str, Any] | None:
        return self._format(delta.tokens, delta.logprobs) if delta.logprobs else None

    def format_echo(self, prompt: Sequence[int], scores: Sequence[TokenLogprobs], delta: OutputDelta | None = None) -> dict[str, Any]:
        """Return the log-probabilities of the prompt, whose first token has none, followed by those of `delta`."""
        tokens, logprobs = (delta.tokens, delta.logprobs) if delta is not None else ([], [])
        return self._format([*prompt, *tokens], [None, *scores, *logprobs])

    def _format(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        texts = [token_text(self._encoder, token) for token in tokens]
        return {
            "tokens": [self._name(token) for token in tokens] if self._by_id else texts,
            "token_logprobs": [each and max(each.chosen, FLOOR) for each in logprobs],
            "top_logprobs": [each and dict(self._top(token, each)) for token, each in zip(tokens, logprobs, strict=True)],
            "text_offset": list(self._offsets(texts)),
        }

    def _top(self, token: int, logprobs: TokenLogprobs) -> Iterator[tuple[str, float]]:
        """Yield the most likely tokens, and always the chosen one."""
        for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            yield self._name(other), max(value, FLOOR)
        if token not in logprobs.top_ids:
            yield self._name(token), max(logprobs.chosen, FLOOR)

    def _name(self, token: int) -> str:
        return token_name(self._encoder, token, self._by_id)

    def _offsets(self, texts: list[str]) -> Iterator[int]:
        for text in texts:
            yield self._offset
            self._offset += len(text)


def format_prompt_logprobs(encoder: PromptEncoder, prompt: Sequence[int], scores: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then `{token id: {logprob, rank, decoded_token}}`, the prompt's token
    first."""

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": token_text(encoder, token)}

    shown: list[dict[str, Any] | None] = [None]
    for token, each in zip(prompt[1:], scores, strict=True):
        top = enumerate(zip(each.top_ids, each.top_logprobs, strict=True), 1)
        others = {str(other): entry(other, value, rank) for rank, (other, value) in top if other != token}
        shown.append({str(token): entry(token, each.chosen, each.rank)} | others)
    return shown


def token_text(encoder: PromptEncoder, token: int) -> str:
    """Return the text of a single token, or the name of a special token."""
    return encoder.decode((token,), skip_special_tokens=False)


def token_name(encoder: PromptEncoder, token: int, by_id: bool) -> str:
    """Return a token's name: its text, which other tokens may share, or its id, as with vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token}" if by_id else token_text(encoder, token)


def token_bytes(encoder: PromptEncoder, token: int) -> list[int]:
    """Return the bytes of a token, also if they are only part of a character."""
    text = token_text(encoder, token)
    if "\ufffd" not in text:
        return list(text.encode())
    written = encoder.token_text(token) or ""
    if len(written) == 6 and written.startswith("<0x"):
        return [int(written[3:5], 16)]
    if written and all(char in _BYTE_OF for char in written):
        return [_BYTE_OF[char] for char in written]
    return list(text.encode())


def _entry(encoder: PromptEncoder, token: int, logprob: float, by_id: bool) -> dict[str, Any]:
    return {"token": token_name(encoder, token, by_id), "bytes": token_bytes(encoder, token), "logprob": max(logprob, FLOOR)}
