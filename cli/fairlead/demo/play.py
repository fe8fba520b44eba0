"""Send concurrent conversations through the router, each turn with all earlier messages, and record pod, cached tokens and TTFT."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from fairlead.bench.client import complete
from fairlead.demo.conversations import Conversation

REPLY_TOKENS = 24
"""Most tokens of an answer. SmolLM2's answers end by themselves before."""
PAUSE_SECONDS = 1.0
"""Time between an answer and the next question, in which a user would read.

After 0.3 s another user's first prompt may still run on the pod, and then a router rightly moves so short a conversation.
"""

USABLE_CHECK_SECONDS = 0.1


@dataclass(frozen=True)
class Turn:
    """One answer. `predicted`: cached tokens that the router predicted (None: it did not read the index); `ttft` in seconds.

    `is_whole`: the answer ended by itself.
    """

    conversation: str
    number: int
    pod: str
    prompt_tokens: int
    predicted: int | None
    cached: int
    ttft: float
    question: str
    answer: str
    is_whole: bool

    @property
    def cached_share(self) -> float:
        return self.cached / self.prompt_tokens if self.prompt_tokens else 0.0


async def wait_usable(base_url: str, workers: int, timeout: float) -> None:
    """Wait until the router uses `workers` workers. A ready router may know only one: it checks discovery and workers once a second.

    Raises TimeoutError after `timeout` seconds.
    """
    usable = 0
    try:
        async with asyncio.timeout(timeout), aiohttp.ClientSession() as session:
            while usable < workers:
                async with session.get(f"{base_url}/fairlead/workers") as answer:
                    usable = sum(worker["usable"] for worker in (await answer.json())["workers"])
                if usable < workers:
                    await asyncio.sleep(USABLE_CHECK_SECONDS)
    except TimeoutError:
        raise TimeoutError(
            f"the router uses {usable} of {workers} ready workers after {timeout:g} s; `fairlead status --url {base_url}` shows why"
        ) from None


class TurnFailed(Exception):
    """A turn without an answer. The message is the server's."""


async def play(
    base_url: str, model: str, conversations: Sequence[Conversation], on_turn: Callable[[Turn], None], pause: float = PAUSE_SECONDS
) -> list[Turn]:
    """Return all turns of all conversations, by conversation and number; call `on_turn` after each. Raises TurnFailed."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(_play_one(session, base_url, model, conversation, on_turn, pause)) for conversation in conversations
                ]
        except* TurnFailed as failed:
            raise failed.exceptions[0] from None
    return [turn for task in tasks for turn in task.result()]


async def _play_one(
    session: aiohttp.ClientSession, base_url: str, model: str, conversation: Conversation, on_turn: Callable[[Turn], None], pause: float
) -> list[Turn]:
    messages = [{"role": "system", "content": conversation.system}]
    turns = []
    for number, question in enumerate(conversation.questions, start=1):
        messages.append({"role": "user", "content": question})
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": REPLY_TOKENS,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if conversation.cache_salt:
            body["cache_salt"] = conversation.cache_salt
        answer = await complete(session, f"{base_url}/v1/chat/completions", body, 0)
        if answer.error:
            raise TurnFailed(f"{conversation.name}, turn {number}: {answer.error}")
        messages.append({"role": "assistant", "content": answer.text})
        turn = Turn(
            conversation.name,
            number,
            answer.pod,
            answer.prompt_len,
            answer.predicted_tokens,
            answer.cached_tokens,
            answer.ttft,
            question,
            answer.text,
            is_whole=answer.output_tokens < REPLY_TOKENS,
        )
        on_turn(turn)
        turns.append(turn)
        await asyncio.sleep(pause)
    return turns
