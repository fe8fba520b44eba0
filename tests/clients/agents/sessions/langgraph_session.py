"""LangGraph's agent with a checkpointer; every third turn is streamed."""

from langchain.agents import create_agent
from langgraph.checkpoint.memory import InMemorySaver
from page import model
from weather import QUESTIONS, calls, report

agent = create_agent(model, tools=[report], system_prompt="You tell of the weather.", checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "weather"}}
for turn, question in enumerate(QUESTIONS):
    asked = {"messages": [("user", question)]}
    if turn % 3 == 2:
        parts = [part for part, _ in agent.stream(asked, thread, stream_mode="messages")]
        assert "".join(part.text for part in parts)
    else:
        assert agent.invoke(asked, thread)["messages"][-1].text
assert len(calls) == len(QUESTIONS) // 2, calls
