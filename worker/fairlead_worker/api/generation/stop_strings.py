"""Stop strings. They are found across token borders, and no part of one is ever shown."""

from collections.abc import Sequence


class StopScanner:
    """Passes text through up to the first stop string. It holds back only text that may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return (text to show, stop string found or None). After a match, the text ends before the stop string."""
        if not self._stops:
            return text, None
        text = self._held + text
        self._held = ""
        # The earliest match wins; at the same position, the longest.
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            return text[:at], stop
        keep = max([self._overlap(text, stop) for stop in self._stops])
        if not keep:
            return text, None
        shown = text[: len(text) - keep]
        self._held = text[len(text) - keep :]
        return shown, None

    def flush(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        rest, self._held = self._held, ""
        return rest

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
        for n in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:n]):
                return n
        return 0
