"""Hold conversations at once through the router, each turn with everything said before, and note what every answer cost."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from fairlead.bench.client import complete
from fairlead.demo.conversations import Conversation

REPLY_TOKENS = 24
THINKING = 0.3
"""Seconds between an answer and the next question: people read before they ask."""


@dataclass(frozen=True)
class Turn:
    """One answer. `predicted`: cached tokens that the router expected (None: it did not ask the index); `ttft` in seconds."""

    conversation: str
    number: int
    pod: str
    prompt_tokens: int
    predicted: int | None
    cached: int
    ttft: float

    @property
    def cached_share(self) -> float:
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0


class TurnFailed(Exception):
    """An answer that did not come; the message is the server's."""


async def play(base_url: str, model: str, people: Sequence[Conversation], told: Callable[[Turn], None]) -> list[Turn]:
    """All turns of all conversations, by conversation and number. Raises TurnFailed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_hold(session, base_url, model, person, told)) for person in people]
        except* TurnFailed as failed:
            raise failed.exceptions[0] from None
    return [turn for task in tasks for turn in task.result()]


async def _hold(
    session: aiohttp.ClientSession, base_url: str, model: str, person: Conversation, told: Callable[[Turn], None]
) -> list[Turn]:
    messages = [{"role": "system", "content": person.system}]
    turns = []
    for number, question in enumerate(person.questions, start=1):
        messages.append({"role": "user", "content": question})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": REPLY_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = await complete(session, f"{base_url}/v1/chat/completions", body, 0)
        if answer.error:
            raise TurnFailed(f"{person.name}, turn {number}: {answer.error}")
        messages.append({"role": "assistant", "content": answer.text})
        turn = Turn(person.name, number, answer.pod, answer.prompt_len, answer.predicted_tokens, answer.cached_tokens, answer.ttft)
        told(turn)
        turns.append(turn)
        await asyncio.sleep(THINKING)
    return turns
