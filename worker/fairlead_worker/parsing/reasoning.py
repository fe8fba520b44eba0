"""Reasoning before the answer: each family's markers, and the stage that separates it."""

from dataclasses import dataclass

from fairlead_worker.parsing.stage import EventSink, Stage, count_overlap


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


class ReasoningStage(Stage):
    """Reads text up to the end marker as reasoning, if the answer begins with the start marker or the prompt ended with it."""

    def __init__(self, format: ReasoningFormat, opened: bool, next_stage: Stage) -> None:
        self.is_reasoning = opened
        self._format, self._next_stage = format, next_stage
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
            return text[at + len(self._format.end) :], self._next_stage
        keep = 0 if final else count_overlap(text, (self._format.end,))
        sink.add_reasoning(text[: len(text) - keep])
        return text[len(text) - keep :], self

    def _begin(self, text: str, final: bool) -> tuple[str, Stage]:
        start, answer_start, stripped = self._format.start, self._format.answer, text.lstrip()
        if stripped.startswith(start):
            self.is_reasoning = self._started = True
            return stripped[len(start) :], self
        if answer_start and stripped.startswith(answer_start):
            return stripped[len(answer_start) :], self._next_stage
        if not final and (start.startswith(stripped) or answer_start.startswith(stripped)):
            return text, self
        if not self.is_reasoning:
            return text, self._next_stage
        self._started = True
        return text, self
