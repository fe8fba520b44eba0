"""One output sequence between the engine and the client: detokenization, stop strings, and output parsing.

Streams and whole responses use the same code, so that they cannot differ.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import cast

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.answers.completions import FinishReason
from fairlead_worker.api.generation.sampling import GenerationOptions
from fairlead_worker.api.generation.stop_strings import StopScanner
from fairlead_worker.ipc.messages import Output, Timing, TokenLogprobs
from fairlead_worker.parsing.events import Event, Text
from fairlead_worker.parsing.stage import Parser

_NO_LOGPROBS = TokenLogprobs(chosen=0.0)


class SequenceFailed(Exception):
    """The engine ended this sequence with an error."""


@dataclass(slots=True)
class OutputDelta:
    """The part of the answer that one engine output added."""

    text: str = ""
    """Generated text, including reasoning and call markup that a parser has read."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Parallel to `tokens`. Empty if the request does not ask for log-probabilities."""
    token_texts: list[str] = field(default_factory=list)
    """What each token adds to the text: nothing for special tokens and for parts of a character but the last. Parallel to `logprobs`."""
    is_last: bool = False
    """True for the last delta of the sequence."""
    parsed_events: list[Event] | None = None
    """Events that the parser made of the text. None without a parser, when everything is text."""

    @property
    def events(self) -> list[Event]:
        if self.parsed_events is not None:
            return self.parsed_events
        return [Text(self.text)] if self.text else []

    @property
    def plain_text(self) -> str | None:
        """Return the text of a delta that is text alone, or None for any other delta."""
        if self.parsed_events is None:
            return self.text
        texts = [event.text for event in self.parsed_events if isinstance(event, Text)]
        return "".join(texts) if len(texts) == len(self.parsed_events) else None

    def add(self, following: "OutputDelta") -> None:
        """Append the delta that comes next."""
        self.text += following.text
        if following.parsed_events is not None:
            self.parsed_events = self.parsed_events or []
            self.parsed_events += following.parsed_events
        self.tokens += following.tokens
        self.logprobs += following.logprobs
        self.token_texts += following.token_texts
        self.is_last = following.is_last


class Choice:
    """The state of one output sequence."""

    def __init__(
        self,
        encoder: PromptEncoder,
        prompt: Sequence[int],
        options: GenerationOptions,
        eos: Sequence[int],
        parser: Parser | None = None,
        visible_special_tokens: Collection[int] = (),
    ) -> None:
        """`visible_special_tokens`: special tokens that `parser` needs to see."""
        self.tokens = 0
        """Generated tokens, including the stop token and the tokens of a stop string."""
        self.cached_tokens = 0
        self.logprob = 0.0
        """Sum over the tokens. 0 if the engine was not asked for log-probabilities."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        """Log-probabilities of the prompt from its second token on. They come with the first delta, if requested."""
        self.timing: Timing | None = None
        """The engine's latest timing of the sequence."""
        self.finish_reason: str | None = None
        """Why the sequence ended. The client sees `client_finish_reason`."""
        self.stop_reason: str | int | None = None
        """The stop string or stop token id that ended the sequence. None for the end-of-sequence token, as in vLLM."""
        self._decoder = encoder.stream(prompt, not options.include_special_tokens, visible_special_tokens if parser is not None else ())
        self._scanner = StopScanner(options.stop_strings)
        self._options = options
        self._eos = eos
        self._parser = parser
        self._parsed_reason: str | None = None

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens that count as output."""
        return 0 if self._options.prompt_only else self.tokens

    @property
    def client_finish_reason(self) -> FinishReason | None:
        """Return the finish reason for the client: `tool_calls` if the answer ended with complete calls. A failed one has no answer."""
        return cast("FinishReason | None", self._parsed_reason or self.finish_reason)

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the number of reasoning tokens, or None without a parser that separates them."""
        return self._parser.reasoning_tokens if self._parser is not None else None

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability of a token, by which `best_of` ranks sequences of any length."""
        return self.logprob / max(self.tokens, 1)

    def process(self, output: Output) -> OutputDelta:
        """Process an engine output. It must not be called after `finish_reason` is set. Raise SequenceFailed."""
        options = self._options
        if output.finish in ("error", "abort"):
            raise SequenceFailed(output.error or "the engine dropped the request")
        if self.tokens == 0:
            self.cached_tokens = output.cached_tokens
        if output.timing is not None:
            self.timing = output.timing
        if output.prompt_logprobs:
            self.prompt_logprobs = output.prompt_logprobs
        if options.prompt_only:
            self.tokens, self.finish_reason = 1, "length"
            return OutputDelta(is_last=True)
        delta = OutputDelta(parsed_events=None if self._parser is None else [])
        tokens = memoryview(output.tokens).cast("I")
        for place, token in enumerate(tokens):
            self.tokens += 1
            delta.tokens.append(token)
            logprobs = output.logprobs[place] if place < len(output.logprobs) else _NO_LOGPROBS
            self.logprob += logprobs.chosen
            is_stop = output.finish == "stop" and place == len(tokens) - 1 and token == output.stop_token and not options.include_stop_str
            # Decode one token at a time: the place of a stop string must not depend on how outputs are batched.
            text = "" if is_stop else self._decoder.push((token,))
            if options.logprobs:
                delta.logprobs.append(logprobs)
                delta.token_texts.append(text)
            if not is_stop and self._append_text(delta, text):
                return delta
        if output.finish is None:
            return delta
        text = self._decoder.finish()
        if delta.token_texts:
            delta.token_texts[-1] += text
        if not self._append_text(delta, text, token=False):
            self._append(delta, self._scanner.flush(), token=False)
            self.finish_reason, delta.is_last = output.finish, True
            if output.stop_token not in self._eos:
                self.stop_reason = output.stop_token
            self._finish_parser(delta, output.finish)
        return delta

    def _append_text(self, delta: OutputDelta, text: str, token: bool = True) -> bool:
        """Append new text to the delta. `token`: the text comes from a token. Return True if the answer ends with it."""
        if self.tokens < self._options.sampling.min_tokens:
            self._append(delta, text, token)
            return False
        shown, stop = self._scanner.feed(text)
        self._append(delta, shown + (stop if stop is not None and self._options.include_stop_str else ""), token)
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
