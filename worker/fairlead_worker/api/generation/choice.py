"""One output sequence on its way from the engine to the client: tokens become text, stop strings end it.

Streamed and whole answers go through the same code, so that they cannot differ.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.generation.stop_strings import StopScanner
from fairlead_worker.messages import Output, Timing, TokenLogprobs
from fairlead_worker.parsing.events import AnswerParser, Event, Text

_NO_LOGPROBS = TokenLogprobs(chosen=0.0)


class SequenceFailed(Exception):
    """The engine gave up on this sequence."""


@dataclass(slots=True)
class OutputDelta:
    """What an output added for the client to see."""

    text: str = ""
    """As it was generated, with the markup of reasoning and calls where a parser has seen it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Parallel to `tokens`; empty where none were asked for."""
    is_last: bool = False
    """The sequence ends with this piece."""
    parsed_events: list[Event] | None = None
    """What a parser made of the text; None where there is none, and all is text."""

    @property
    def events(self) -> list[Event]:
        if self.parsed_events is not None:
            return self.parsed_events
        return [Text(self.text)] if self.text else []

    @property
    def plain_text(self) -> str | None:
        """The text of a piece that is text alone; None for any other."""
        if self.parsed_events is None:
            return self.text
        texts = [event.text for event in self.parsed_events if isinstance(event, Text)]
        return "".join(texts) if len(texts) == len(self.parsed_events) else None

    def add(self, following: "OutputDelta") -> None:
        """Append the piece that comes next."""
        self.text += following.text
        if following.parsed_events is not None:
            self.parsed_events = self.parsed_events or []
            self.parsed_events += following.parsed_events
        self.tokens += following.tokens
        self.logprobs += following.logprobs
        self.is_last = following.is_last


class Choice:
    """The state of one sequence."""

    def __init__(
        self,
        encoder: PromptEncoder,
        prompt: Sequence[int],
        *,
        stop_strings: Sequence[str],
        min_tokens: int,
        eos: Sequence[int],
        logprobs: bool,
        prompt_only: bool = False,
        parser: AnswerParser | None = None,
        visible_special_tokens: Collection[int] = (),
        include_special_tokens: bool = False,
        include_stop_str: bool = False,
    ) -> None:
        """`shown`: special tokens that `parser` has to see."""
        self.tokens = 0
        """Tokens generated, the stop token and the tokens of a stop string included."""
        self.cached_tokens = 0
        self.logprob = 0.0
        """Sum over the tokens; 0 where the engine was not asked for log-probabilities."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Of its prompt's second token and all after it; with the first piece, where they were asked for."""
        self.timing: Timing | None = None
        """The engine's latest word on it."""
        self.finish_reason: str | None = None
        """Why the sequence ended; what its client is told is `shown_reason`."""
        self.stop_reason: str | int | None = None
        """The stop string or stop token id that ended it; None for the end-of-sequence token, as in vLLM."""
        self._decoder = encoder.stream(prompt, not include_special_tokens, visible_special_tokens if parser is not None else ())
        self._scanner = StopScanner(stop_strings)
        self._min_tokens = min_tokens
        self._eos = eos
        self._logprobs = logprobs
        self._prompt_only = prompt_only
        """The prompt is all that is wanted: the token that ends its computation is nobody's."""
        self._parser = parser
        self._parsed_reason: str | None = None
        self._include_stop_str = include_stop_str
        """What ended it, a stop string or a stop token, is part of the text."""

    @property
    def output_tokens(self) -> int:
        """Tokens that count as output."""
        return 0 if self._prompt_only else self.tokens

    @property
    def client_finish_reason(self) -> str | None:
        """The finish reason for the client: `tool_calls` where the answer ended with calls that are whole."""
        return self._parsed_reason or self.finish_reason

    @property
    def reasoning_tokens(self) -> int | None:
        """Of the tokens, those that were reasoning; None where nobody tells them apart."""
        return self._parser.reasoning_tokens if self._parser is not None else None

    @property
    def mean_logprob(self) -> float:
        """How likely the model found its tokens, whatever their number: what `best_of` ranks by."""
        return self.logprob / max(self.tokens, 1)

    def process(self, output: Output) -> OutputDelta:
        """Add an output. Once `finish_reason` is set, nothing more may come. Raises SequenceFailed."""
        if output.finish in ("error", "abort"):
            raise SequenceFailed(output.error or "the engine dropped the request")
        if self.tokens == 0:
            self.cached_tokens = output.cached_tokens
        if output.timing is not None:
            self.timing = output.timing
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if self._prompt_only:
            self.tokens, self.finish_reason = 1, "length"
            return OutputDelta(is_last=True)
        delta = OutputDelta(parsed_events=None if self._parser is None else [])
        tokens = memoryview(output.tokens).cast("I")
        for place, token in enumerate(tokens):
            self.tokens += 1
            delta.tokens.append(token)
            logprobs = output.logprobs[place] if place < len(output.logprobs) else _NO_LOGPROBS
            self.logprob += logprobs.chosen
            if self._logprobs:
                delta.logprobs.append(logprobs)
            if output.finish == "stop" and place == len(tokens) - 1 and token == output.stop_token and not self._include_stop_str:
                break
            # One token at a time, however many came at once: where a stop string ends must not depend on the batching.
            if self._append_text(delta, self._decoder.push((token,))):
                return delta
        if output.finish is not None and not self._append_text(delta, self._decoder.finish(), token=False):
            self._append(delta, self._scanner.flush(), token=False)
            self._set_finish_reason(delta, output)
            self._finish_parser(delta, output.finish)
        return delta

    def _append_text(self, delta: OutputDelta, text: str, token: bool = True) -> bool:
        """Add new text to the piece, of a token unless told otherwise; True when the answer ends with it."""
        if self.tokens < self._min_tokens:
            self._append(delta, text, token)
            return False
        shown, stop = self._scanner.feed(text)
        self._append(delta, shown + (stop if stop is not None and self._include_stop_str else ""), token)
        if stop is None and (self._parser is None or not self._parser.complete):
            return False
        self.finish_reason, self.stop_reason, delta.is_last = "stop", stop, True
        self._finish_parser(delta, "stop")
        return True

    def _append(self, delta: OutputDelta, text: str, token: bool) -> None:
        delta.text += text
        if self._parser is not None and delta.parsed_events is not None and (text or token):
            delta.parsed_events += self._parser.feed(text, token)

    def _finish_parser(self, delta: OutputDelta, reason: str) -> None:
        if self._parser is not None and delta.parsed_events is not None:
            events, self._parsed_reason = self._parser.finish(reason)
            delta.parsed_events += events

    def _set_finish_reason(self, delta: OutputDelta, output: Output) -> None:
        self.finish_reason, delta.is_last = output.finish, True
        if output.stop_token not in self._eos:
            self.stop_reason = output.stop_token
