"""Reasoning before the answer: each family's markers, and the stage that separates it."""

from dataclasses import dataclass

from fairlead_worker.parsing.stage import EventSink, Stage, overlap


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The reasoning markers of one family."""

    start: str
    end: str
    always: bool = False
    """True if an answer begins with reasoning even without a start marker in the prompt or the answer."""
    answer: str = ""
    """The start of an answer without reasoning."""


REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "deepseek_v3": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}


class ReasoningStage:
    """Reads text up to the end marker as reasoning, if the answer begins with the start marker or the prompt ended with it."""

    def __init__(self, format: ReasoningFormat, opened: bool, then: Stage) -> None:
        self.is_reasoning = opened
        self._format, self._then = format, then
        self._started = False

    def consume(self, text: str, final: bool, sink: EventSink) -> tuple[str, Stage]:
        if not self._started:
            text, stage = self._begin(text, final)
            if not self._started:
                return text, stage
        at = text.find(self._format.end)
        if at >= 0:
            sink.add_reasoning(text[:at])
            sink.end_reasoning()
            return text[at + len(self._format.end) :], self._then
        keep = 0 if final else overlap(text, (self._format.end,))
        sink.add_reasoning(text[: len(text) - keep])
        return text[len(text) - keep :], self

    def _begin(self, text: str, final: bool) -> tuple[str, Stage]:
        start, direct, stripped = self._format.start, self._format.answer, text.lstrip()
        if stripped.startswith(start):
            self.is_reasoning = self._started = True
            return stripped[len(start) :], self
        if direct and stripped.startswith(direct):
            return stripped[len(direct) :], self._then
        if not final and (start.startswith(stripped) or direct.startswith(stripped)):
            return text, self
        if not self.is_reasoning:
            return text, self._then
        self._started = True
        return text, self
