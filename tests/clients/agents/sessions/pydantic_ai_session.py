"""Pydantic AI; every third turn is streamed."""

import asyncio
from typing import Any

from page import model
from pydantic_ai import Agent
from weather import QUESTIONS, calls, report


async def main() -> None:
    agent = Agent(model, tools=[report], instructions="You tell of the weather.", retries=0)
    history: list[Any] = []
    for turn, question in enumerate(QUESTIONS):
        if turn % 3 == 2:
            async with agent.run_stream(question, message_history=history) as run:
                assert await run.get_output()
                history = run.all_messages()
        else:
            done = await agent.run(question, message_history=history)
            assert done.output
            history = done.all_messages()
    assert len(calls) == len(QUESTIONS) // 2, calls


asyncio.get_event_loop().run_until_complete(main())  # the loop of the example, to which the client is bound
