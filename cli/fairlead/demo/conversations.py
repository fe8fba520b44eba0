"""Three users, each with a teacher's long instructions and short questions: the workload that gains most from a cached prefix.

SmolLM2-135M knows these answers. Sample answers in the instructions keep its own short; without them it repeats itself.
"""

from dataclasses import dataclass

_INSTRUCTIONS = """\
You are a {subject} teacher. You answer each question of a student in one short and friendly sentence. \
You give the fact that the student wants, and nothing else. You do not repeat the question, and you do not add a second sentence.

Here are good answers of other lessons:

{samples}
"""


@dataclass(frozen=True)
class Conversation:
    """A system prompt, and the user's messages by turn. `cache_salt` separates its cached blocks from those of other runs."""

    name: str
    system: str
    questions: tuple[str, ...]
    cache_salt: str = ""


def _instructions(subject: str, *samples: tuple[str, str]) -> str:
    return _INSTRUCTIONS.format(subject=subject, samples="\n\n".join(f"Question: {asked}\nAnswer: {answer}" for asked, answer in samples))


_GEOGRAPHY = _instructions(
    "geography",
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the longest river in Africa?", "The longest river in Africa is the Nile."),
    ("In which country is Mount Fuji?", "Mount Fuji is in Japan."),
    ("Which ocean is between Africa and Australia?", "The Indian Ocean is between Africa and Australia."),
    ("What language do people speak in Brazil?", "People in Brazil speak Portuguese."),
    ("What is the largest desert in Asia?", "The largest desert in Asia is the Gobi Desert."),
)
_SCIENCE = _instructions(
    "science",
    ("What is the largest planet of the solar system?", "The largest planet of the solar system is Jupiter."),
    ("What is table salt made of?", "Table salt is made of sodium and chlorine."),
    ("Which organ pumps blood through the body?", "The heart pumps blood through the body."),
    ("How long does the Earth need to travel around the sun?", "The Earth needs one year to travel around the sun."),
    ("What do plants take out of the air?", "Plants take carbon dioxide out of the air."),
    ("Which metal is liquid at room temperature?", "Mercury is liquid at room temperature."),
)
_HISTORY = _instructions(
    "history",
    ("Who was the first person on the moon?", "The first person on the moon was Neil Armstrong."),
    ("In which country are the pyramids of Giza?", "The pyramids of Giza are in Egypt."),
    ("When did the Second World War end?", "The Second World War ended in 1945."),
    ("Who was the first emperor of Rome?", "The first emperor of Rome was Augustus."),
    ("Which people built Machu Picchu?", "The Inca people built Machu Picchu."),
    ("Who invented the telephone?", "Alexander Graham Bell invented the telephone."),
)
_CONVERSATIONS = (
    (
        "anna",
        _GEOGRAPHY,
        (
            "What is the capital of France?",
            "Which river flows through it?",
            "What is the capital of Italy?",
            "What is the largest ocean on Earth?",
            "What is the highest mountain in the world?",
        ),
    ),
    (
        "boris",
        _SCIENCE,
        (
            "What is the chemical formula of water?",
            "At which temperature does water boil?",
            "Which planet is known as the Red Planet?",
            "What force pulls things to the ground?",
            "What do bees make?",
        ),
    ),
    (
        "chloe",
        _HISTORY,
        (
            "In which city is the Colosseum?",
            "When did the First World War begin?",
            "Which ship sank in 1912?",
            "Who painted the Mona Lisa?",
            "Where is the Statue of Liberty?",
        ),
    ),
)


def conversations(run: str) -> list[Conversation]:
    """Return the three conversations. `run` salts every prompt, so that no run hits cached blocks of another."""
    return [Conversation(name, system, questions, f"{run} {name}") for name, system, questions in _CONVERSATIONS]
