"""Three users, each with a long document and short questions about it: the workload that gains most from a cached prefix."""

from dataclasses import dataclass
from pydoc_data.topics import topics

DOCUMENT_CHARACTERS = 2600
"""About 650 tokens with the demo's tokenizer, which was trained on these texts."""


@dataclass(frozen=True)
class Conversation:
    """A system prompt, and the user's messages by turn."""

    name: str
    system: str
    questions: tuple[str, ...]


_QUESTIONS = (
    "Please sum this up in two sentences for a reader new to the language.",
    "Which of these rules surprises people most often, and why was it made that way?",
    "Give a short example that breaks one of them, and say what would happen.",
    "How would you explain the difference to a Java developer?",
    "Thank you. Which part should I read again before I write my own?",
)
_SUBJECTS = {"anna": "assignment", "boris": "calls", "chloe": "import"}


def conversations(run: str) -> list[Conversation]:
    """Return the three conversations. `run` begins every prompt, so that no run hits cached blocks of another."""
    return [
        Conversation(
            name, f"[{run}, {name}] Answer questions about this text.\n\n{topics[subject].strip()[:DOCUMENT_CHARACTERS]}", _QUESTIONS
        )
        for name, subject in _SUBJECTS.items()
    ]
