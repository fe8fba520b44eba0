"""Tool calls and reasoning over HTTP, from a real engine. The model is random, so grammars and biases make it write the calls."""

import json
from typing import Any

import jsonschema
import openai
import pytest
from tests.worker.api.process import WorkerProcess

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
NOW = {"type": "object", "properties": {}, "additionalProperties": False}


def function(name: str, parameters: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [function("get_weather", WEATHER), function("now", NOW)]
CHAT = [{"role": "user", "content": "How is the weather?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ONE_CALL = r'<tool_call>\n\{"name": "get_weather", "arguments": \{"city": "[a-z]{1,6}", "unit": "C"\}\}\n</tool_call>'
THINK, THOUGHT = 1020, 1021
"""Token ids of the reasoning markers."""


@pytest.fixture(scope="module")
def worker(flagged: WorkerProcess) -> WorkerProcess:
    return flagged


@pytest.fixture(scope="module")
def sdk(worker: WorkerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)


def body(**fields: Any) -> dict[str, Any]:
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"messages": CHAT, "tools": TOOLS, "max_tokens": 300, "seed": 5, "temperature": 1.0} | quiet | fields


def whole(worker: WorkerProcess, **fields: Any) -> dict[str, Any]:
    response = worker.post("/v1/chat/completions", **body(**fields))
    assert response.status_code == 200, response.text
    return response.json()


def streamed(worker: WorkerProcess, **fields: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the choices of a stream in the form of a whole response, and all deltas."""
    choices: dict[int, dict[str, Any]] = {}
    deltas = []
    with worker.stream("/v1/chat/completions", **body(**fields)) as (response, events):
        assert response.status_code == 200, response.read()
        for event in events:
            if event == "[DONE]":
                break
            assert isinstance(event, dict) and "error" not in event, event
            for part in event["choices"]:
                empty = {"content": None, "reasoning": "", "calls": [], "finish_reason": None, "logprobs": []}
                choice = choices.setdefault(part["index"], empty)
                assert choice["finish_reason"] is None, "a choice went on after its finish"
                delta = part["delta"]
                deltas.append(delta)
                if delta.get("content"):
                    choice["content"] = (choice["content"] or "") + delta["content"]
                choice["reasoning"] += delta.get("reasoning") or ""
                for call in delta.get("tool_calls", []):
                    if "id" in call:
                        assert call["index"] == len(choice["calls"]) and call["function"]["arguments"] == ""
                        choice["calls"].append([call["function"]["name"], ""])
                    else:
                        choice["calls"][call["index"]][1] += call["function"]["arguments"]
                choice["logprobs"] += (part["logprobs"] or {}).get("content") or []
                choice["finish_reason"] = part["finish_reason"]
    return [choices[index] for index in sorted(choices)], deltas


def shown(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a whole choice in the form of `streamed`."""
    message = choice["message"]
    return {
        "content": message["content"] or None,
        "reasoning": message["reasoning"] or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])],
        "finish_reason": choice["finish_reason"],
        "logprobs": (choice["logprobs"] or {}).get("content") or [],
    }


SCHEMAS = {"get_weather": WEATHER, "now": NOW}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {str(THOUGHT): 100}}


@pytest.mark.parametrize(
    ("fields", "least", "most"),
    [
        ({"tool_choice": "required"}, 1, None),
        ({"tool_choice": "required", "parallel_tool_calls": False}, 1, 1),
        ({"tool_choice": NAMED}, 1, 1),
        ({"tool_choice": NAMED, "n": 3, "logprobs": True, "top_logprobs": 1}, 1, 1),
        ({"tool_choice": "required", **THINKING}, 1, None),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, 1, None),
        ({"tool_choice": NAMED, **THINKING}, 1, 1),
        ({"structured_outputs": {"regex": ONE_CALL}}, 1, 1),
        ({"structured_outputs": {"regex": f"Well[.]\n({ONE_CALL}\n){{2}}"}, "tool_choice": "auto"}, 2, 2),
        ({"structured_outputs": {"regex": f"({ONE_CALL}){{2}}"}, "parallel_tool_calls": False}, 1, 1),
        ({"structured_outputs": {"regex": ONE_CALL}, **THINKING}, 1, 1),
        ({"structured_outputs": {"regex": ONE_CALL}, "tool_choice": "none"}, 0, 0),
        ({"structured_outputs": {"regex": ONE_CALL}, "tools": [TOOLS[1]]}, 0, 0),
        ({"response_format": {"type": "json_object"}, "max_tokens": 40}, 0, 0),
    ],
)
def test_calls_streamed_and_whole(worker: WorkerProcess, fields: dict[str, Any], least: int, most: int | None) -> None:
    choices = [shown(choice) for choice in whole(worker, **fields)["choices"]]
    assert streamed(worker, **fields)[0] == choices
    for choice in choices:
        finished = choice["finish_reason"]
        assert least <= len(choice["calls"]) and (most is None or len(choice["calls"]) <= most)
        if finished == "length" and fields.get("tool_choice") == "required":
            continue  # an array that never ends
        if least:
            assert finished == "tool_calls"
        for name, arguments in choice["calls"]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        if choice["calls"] and "Well" not in str(fields):
            assert choice["content"] is None
        if not choice["calls"] and "regex" in str(fields):
            assert choice["content"] is not None and choice["content"].startswith("<tool_call>") and finished == "stop"


def test_truncated_calls_are_length(worker: WorkerProcess) -> None:
    for fields in ({"tool_choice": NAMED, "max_tokens": 4}, {"structured_outputs": {"regex": ONE_CALL}, "max_tokens": 30}):
        (choice,) = whole(worker, **fields)["choices"]
        assert choice["finish_reason"] == "length"
        assert streamed(worker, **fields)[0] == [shown(choice)]


def test_a_stop_string_within_a_call_leaves_it_unfinished(worker: WorkerProcess) -> None:
    (choice,) = whole(worker, tool_choice=NAMED, stop=['"unit"'])["choices"]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == '"unit"'
    assert not choice["message"]["tool_calls"][0]["function"]["arguments"].endswith("}")


def test_reasoning_is_apart_and_counted(worker: WorkerProcess) -> None:
    opened = {"chat_template_kwargs": {"enable_thinking": True}, "tools": None, "ignore_eos": True, "max_tokens": 20, "temperature": 0}
    answer = whole(worker, **opened)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != "" and message["content"] == ""
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}
    hidden = whole(worker, **opened, include_reasoning=False)["choices"][0]["message"]
    assert hidden["reasoning"] is None and hidden["content"] == ""
    ended = whole(worker, **opened | {"logit_bias": {str(THOUGHT): 100}})
    assert ended["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    assert "</think>" in ended["choices"][0]["message"]["content"]  # the second one: the first only closes itself


def test_a_thinking_budget_ends_the_reasoning_and_changes_no_token_before(worker: WorkerProcess) -> None:
    opened = {
        "chat_template_kwargs": {"enable_thinking": True},
        "tools": None,
        "ignore_eos": True,
        "max_tokens": 12,
        "return_token_ids": True,
    }
    # The prompt ends with the start marker and a line break, which counts as in vLLM.
    for more in ({"temperature": 0}, {"n": 2}, {"logprobs": True, "min_tokens": 9}, {"n": 2, "frequency_penalty": 0.5}):
        free = [choice["token_ids"] for choice in whole(worker, **opened, **more)["choices"]]
        for budget in (0, 1, 2, 6):
            answer = whole(worker, **opened, **more, thinking_token_budget=budget)
            left = max(0, budget - 1)
            for tokens, choice in zip(free, answer["choices"], strict=True):
                assert choice["token_ids"][: left + 1] == [*tokens[:left], THOUGHT] and len(choice["token_ids"]) == 12
                assert choice["message"]["content"]
            assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": (left + 1) * len(free)}
        assert [choice["token_ids"] for choice in whole(worker, **opened, **more, thinking_token_budget=13)["choices"]] == free


def test_a_form_follows_reasoning_that_its_budget_ended(worker: WorkerProcess) -> None:
    opened = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {str(THOUGHT): -100}, "max_tokens": 40}
    answer = whole(worker, **opened, tools=None, structured_outputs={"choice": ["yes", "no"]}, thinking_token_budget=4)
    assert answer["choices"][0]["message"]["content"] in ("yes", "no") and answer["choices"][0]["finish_reason"] == "stop"
    (choice,) = whole(worker, **opened | {"max_tokens": 300}, tool_choice=NAMED, thinking_token_budget=4)["choices"]
    assert choice["finish_reason"] == "tool_calls"


def test_a_budget_has_no_effect_where_there_is_no_reasoning(worker: WorkerProcess) -> None:
    assert whole(worker, thinking_token_budget=0)["choices"][0]["message"] == whole(worker)["choices"][0]["message"]


def test_the_budget_of_a_message_is_enforced(worker: WorkerProcess) -> None:
    asked = {"messages": CHAT, "max_tokens": 12, "thinking": {"type": "enabled", "budget_tokens": 5}}
    answer = worker.post("/v1/messages", **asked, logit_bias={str(THOUGHT): -100}, ignore_eos=True, seed=3).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


def test_a_form_begins_after_the_reasoning(worker: WorkerProcess) -> None:
    fields = {"tools": None, "structured_outputs": {"choice": ["yes", "no"]}}
    begun = {"logit_bias": {str(THINK): 100, str(THOUGHT): 90}, "chat_template_kwargs": {}}
    for each in (fields | THINKING, fields | begun):
        answer = whole(worker, **each)
        assert answer["choices"][0]["message"]["content"] in ("yes", "no")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 1


def test_strict_functions_of_its_own_accord(worker: WorkerProcess) -> None:
    """A bias makes the model write the marker, and the grammar does the rest."""
    fields = {"tools": [function("get_weather", WEATHER, strict=True)], "logit_bias": {"1022": 100}, "parallel_tool_calls": False}
    answer = whole(worker, **fields)["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    jsonschema.validate(json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]), WEATHER)
    assert streamed(worker, **fields)[0] == [shown(answer)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "none_such"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("x")]}}},
         "tool_choice.allowed_tools.tools[0].function.name"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOLS[0], function("a b")]}, "tools[1].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [function("x", {"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [function("x", {"properties": 7})], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],

)  # fmt: skip
def test_what_does_not_work_is_refused_by_name(worker: WorkerProcess, fields: dict[str, Any], param: str) -> None:
    response = worker.post("/v1/chat/completions", **body(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(param.split(".")[0].split("[")[0])


def test_allowed_tools(worker: WorkerProcess) -> None:
    listed = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": listed}}
    (answer,) = whole(worker, tool_choice=choice, parallel_tool_calls=False)["choices"]
    assert [call["function"]["name"] for call in answer["message"]["tool_calls"]] == ["now"]
    choice["allowed_tools"]["mode"] = "auto"  # type: ignore[index]
    (answer,) = whole(worker, tool_choice=choice, structured_outputs={"regex": ONE_CALL})["choices"]
    assert "tool_calls" not in answer["message"] and answer["message"]["content"].startswith("<tool_call>")


def test_none_leaves_the_tools_out_of_the_prompt(worker: WorkerProcess) -> None:
    sizes = {choice: whole(worker, tool_choice=choice, max_tokens=1)["usage"]["prompt_tokens"] for choice in ("none", "auto", "required")}
    bare = whole(worker, tools=None, max_tokens=1)["usage"]["prompt_tokens"]
    assert sizes["none"] == bare < sizes["auto"] == sizes["required"]


def test_the_openai_client_holds_a_conversation(sdk: openai.OpenAI) -> None:
    messages: list[Any] = list(CHAT)
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    common: dict[str, Any] = {"model": sdk.models.list().data[0].id, "tools": TOOLS, "seed": 3, "max_tokens": 200, "extra_body": extra}
    with sdk.chat.completions.stream(messages=messages, tool_choice=NAMED, **common) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert done[0].name == "get_weather" and message.content is None
    messages += [message.model_dump(exclude_none=True, exclude={"parsed"}), {"role": "tool", "tool_call_id": call.id, "content": "17 C"}]
    again = sdk.chat.completions.create(messages=messages, tool_choice="required", parallel_tool_calls=False, **common)
    assert again.choices[0].finish_reason == "tool_calls" and again.choices[0].message.tool_calls


def test_the_worker_says_how_it_reads_answers(worker: WorkerProcess) -> None:
    assert "tool calls: hermes (from the chat template), reasoning: think (from the chat template)" in worker.log.read_text()
