"""The OpenAI Agents SDK with its own session store; every third turn is streamed."""

import asyncio

from agents import Agent, Runner, SQLiteSession, function_tool
from page import model
from weather import QUESTIONS, calls, report


async def main() -> None:
    agent = Agent("Reporter", instructions="You tell of the weather.", model=model, tools=[function_tool(report)])
    session = SQLiteSession("weather")
    for turn, question in enumerate(QUESTIONS):
        if turn % 3 == 2:
            streamed = Runner.run_streamed(agent, question, session=session)
            kinds = {event.type async for event in streamed.stream_events()}
            assert "raw_response_event" in kinds and streamed.final_output
        else:
            assert (await Runner.run(agent, question, session=session)).final_output
    assert len(calls) == len(QUESTIONS) // 2, calls


asyncio.get_event_loop().run_until_complete(main())  # the loop of the example, to which the client is bound
