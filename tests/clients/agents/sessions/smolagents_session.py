"""smolagents: each turn has two steps, a call of the tool and one of `final_answer`.

By default it sends `tool_choice: required`, as in the guide's example. Here the gateway holds the calls instead, so that they end soon.
"""

from page import model
from smolagents import ToolCallingAgent, tool
from weather import QUESTIONS, calls, report

model.kwargs["tool_choice"] = "auto"
agent = ToolCallingAgent([tool(report)], model, max_steps=2)
for turn, question in enumerate(QUESTIONS):
    agent.stream_outputs = turn % 3 == 2
    assert agent.run(question, reset=False) == "It is warm."
assert len(calls) == len(QUESTIONS), calls
