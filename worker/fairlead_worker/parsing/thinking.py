"""Reasoning before the answer: which markers a family puts around it, and the stage that splits it off."""

from dataclasses import dataclass

from fairlead_worker.parsing.stage import Out, Stage, overlap


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    """The markers of one family."""

    start: str
    end: str
    always: bool = False
    """An answer begins with reasoning, also where neither prompt nor answer has the start marker."""
    answer: str = ""
    """What an answer without reasoning begins with."""


THINKING: dict[str, ThinkingFormat] = {
    "think": ThinkingFormat("<think>", "</think>"),
    "qwen3": ThinkingFormat("<think>", "</think>"),
    "deepseek_v3": ThinkingFormat("<think>", "</think>"),
    "deepseek_r1": ThinkingFormat("<think>", "</think>", always=True),
    "mistral": ThinkingFormat("[THINK]", "[/THINK]"),
    "granite": ThinkingFormat("Here is my thought process:", "Here is my response:"),
    "seed_oss": ThinkingFormat("<seed:think>", "</seed:think>"),
}


class Thinking:
    """Text up to the end marker is reasoning, if the answer begins with the start marker or the prompt ended with it."""

    def __init__(self, format: ThinkingFormat, opened: bool, then: Stage) -> None:
        self.thinks = opened
        self._format, self._then = format, then
        self._begun = False

    def take(self, text: str, final: bool, out: Out) -> tuple[str, Stage]:
        if not self._begun:
            text, stage = self._begin(text, final)
            if not self._begun:
                return text, stage
        at = text.find(self._format.end)
        if at >= 0:
            out.reasoning(text[:at])
            out.answer()
            return text[at + len(self._format.end) :], self._then
        keep = 0 if final else overlap(text, (self._format.end,))
        out.reasoning(text[: len(text) - keep])
        return text[len(text) - keep :], self

    def _begin(self, text: str, final: bool) -> tuple[str, Stage]:
        start, direct, stripped = self._format.start, self._format.answer, text.lstrip()
        if stripped.startswith(start):
            self.thinks = self._begun = True
            return stripped[len(start) :], self
        if direct and stripped.startswith(direct):
            return stripped[len(direct) :], self._then
        if not final and (start.startswith(stripped) or direct.startswith(stripped)):
            return text, self
        if not self.thinks:
            return text, self._then
        self._begun = True
        return text, self
