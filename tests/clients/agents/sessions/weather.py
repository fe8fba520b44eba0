"""What the sessions ask, and the tool that answers: every second question is answered by a call of it."""

import os
from typing import Literal

EVERY = [f"{question} {city}?" for city in ("Oslo", "Rome", "Lima", "Cairo", "Tokyo") for question in ("Is it cold in", "Why go to")]
QUESTIONS = EVERY[: int(os.environ["TURNS"])]
calls: list[str] = []
"""The city of each call."""


def report(city: Literal["Oslo", "Rome"], days: int = 1) -> str:
    """Report the weather of a city.

    Args:
        city: The city to report on.
        days: The number of days to report on.
    """
    calls.append(city)
    return f"{days} days of sun over {city}, and a wind as in “May”."
