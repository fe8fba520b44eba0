"""Log-probabilities in the formats of completions and chat completions."""

from collections.abc import Iterator, Sequence
from typing import Any

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.answers.completions import ChatLogprobs, CompletionLogprobs, PromptLogprobs, TokenLogprob, TopLogprob
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.ipc.messages import TokenLogprobs

FLOOR = -9999.0
"""JSON has no infinity. vLLM uses the same number."""


def format_chat_logprobs(encoder: PromptEncoder, delta: OutputDelta, by_id: bool = False) -> ChatLogprobs | None:
    """Return the log-probabilities of the tokens of a delta. `by_id`: write tokens as `token_id:7`."""
    if not delta.logprobs:
        return None
    content = []
    for token, text, logprobs in zip(delta.tokens, delta.token_texts, delta.logprobs, strict=True):
        own = _entry(encoder, token, text, logprobs.chosen, by_id)
        top = [
            own if other == token else _entry(encoder, other, None, value, by_id)
            for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        ]
        content.append(TokenLogprob(own.token, own.bytes, own.logprob, top))
    return ChatLogprobs(content)


class CompletionLogprobsFormatter:
    """Builds the log-probabilities of completions. Offsets continue over the deltas of a choice."""

    def __init__(self, encoder: PromptEncoder, by_id: bool = False, skip_special_tokens: bool = True) -> None:
        """`skip_special_tokens`: the echoed prompt's text leaves them out."""
        self._encoder = encoder
        self._by_id = by_id
        self._skips = skip_special_tokens
        self._offset = 0

    def format_delta(self, delta: OutputDelta) -> CompletionLogprobs | None:
        return self._format(delta.tokens, delta.token_texts, delta.logprobs) if delta.logprobs else None

    def format_echo(self, prompt: Sequence[int], scores: Sequence[TokenLogprobs], delta: OutputDelta | None = None) -> CompletionLogprobs:
        """Return the log-probabilities of the prompt, whose first token has none, followed by those of `delta`."""
        tokens, texts, logprobs = (delta.tokens, delta.token_texts, delta.logprobs) if delta is not None else ([], [], [])
        return self._format([*prompt, *tokens], [*prompt_texts(self._encoder, prompt, self._skips), *texts], [None, *scores, *logprobs])

    def _format(self, tokens: Sequence[int], texts: Sequence[str], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        names = [_name(self._encoder, token, text, self._by_id) for token, text in zip(tokens, texts, strict=True)]
        return CompletionLogprobs(
            tokens=names,
            token_logprobs=[None if each is None else max(each.chosen, FLOOR) for each in logprobs],
            top_logprobs=[
                None if each is None else self._top(token, name, each) for token, name, each in zip(tokens, names, logprobs, strict=True)
            ],
            text_offset=list(self._offsets(texts)),
        )

    def _top(self, token: int, name: str, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens, and always the chosen one, by names. Of tokens with one text, all but one have their ids."""
        top: dict[str, float] = {}
        for other, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            key = name if other == token else _name(self._encoder, other, None, self._by_id)
            if key in top or (key == name and other != token):
                key = _id_name(other)
            top[key] = max(value, FLOOR)
        if token not in logprobs.top_ids:
            top[name] = max(logprobs.chosen, FLOOR)
        return top

    def _offsets(self, texts: Sequence[str]) -> Iterator[int]:
        for text in texts:
            yield self._offset
            self._offset += len(text)


def format_prompt_logprobs(encoder: PromptEncoder, prompt: Sequence[int], scores: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """Return vLLM's `prompt_logprobs`: null for the first token, then `{token id: {logprob, rank, decoded_token}}`, the prompt's token
    first."""

    def entry(token: int, text: str | None, value: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(value, FLOOR), "rank": rank, "decoded_token": _name(encoder, token, text, False)}

    shown: PromptLogprobs = [None]
    for token, text, each in zip(prompt[1:], prompt_texts(encoder, prompt, True)[1:], scores, strict=True):
        top = enumerate(zip(each.top_ids, each.top_logprobs, strict=True), 1)
        others = {str(other): entry(other, None, value, rank) for rank, (other, value) in top if other != token}
        shown.append({str(token): entry(token, text, each.chosen, each.rank)} | others)
    return shown


def prompt_texts(encoder: PromptEncoder, prompt: Sequence[int], skip_special_tokens: bool) -> list[str]:
    """Return what each token adds to a prompt's text. A character of several tokens belongs to its last one."""
    stream = encoder.stream((), skip_special_tokens)
    texts = [stream.push((token,)) for token in prompt]
    if texts:
        texts[-1] += stream.finish()
    return texts


def _id_name(token: int) -> str:
    """Return a token's name by its id, as with vLLM's `return_tokens_as_token_ids`."""
    return f"token_id:{token}"


def _name(encoder: PromptEncoder, token: int, text: str | None, by_id: bool) -> str:
    """Return a token's name. `text`: what it adds to the text at its place, or None for a token that was not chosen there."""
    if by_id:
        return _id_name(token)
    if text is None:
        return encoder.token_texts.name_of(token)
    return text or encoder.token_texts.special_name(token)


def _entry(encoder: PromptEncoder, token: int, text: str | None, logprob: float, by_id: bool) -> TopLogprob:
    written = encoder.token_texts.bytes_of(token, text)
    return TopLogprob(_name(encoder, token, text, by_id), list(written), max(logprob, FLOOR))
