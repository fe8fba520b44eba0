"""Random valid requests, each sent whole and as a stream: both answers must agree to the last log-probability and token count.

python -m tests.api.golden --count 500 --seed 1

Temperature is 0, and each answer has its own cache salt, so that neither finds blocks of the other.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from tests.api.answers import from_stream, from_whole, is_close
from tests.api.fleet import Pair

from fairlead_common.protocols.messages import MessagesBody
from fairlead_common.protocols.paths import CHAT, COMPLETIONS
from fairlead_common.protocols.responses import ResponsesBody

AT_ONCE = 8
SIGNS = {"with a call": '"name": "weather", "arg', "with reasoning": '"reasoning_content"', "with thinking": '"type": "thinking"'}
SIGNS |= {"with a function call": '"type": "function_call"', "with a tool use": '"tool_use"', "with reasoning items": '"reasoning_text"'}
"""Signs of what an answer contains."""
WORDS = ("hello", "naïve", "日本語", "🎉", "the end", "a b c", "{}", "one two three", "\n\n")
FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "items": {"type": "integer"}}}}},
    {"structured_outputs": {"regex": "(yes|no|maybe), [a-z]{3}"}},
    {"structured_outputs": {"choice": ["left", "right", "naïve 🎉"]}},
    {"guided_grammar": 'start: "a" rest\nrest: "b" | "c" rest'},
)


CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "cold": {"type": "boolean"}}, "required": ["city", "cold"]}
FUNCTION = {"name": "weather", "description": "The weather in a city", "parameters": CITY | {"additionalProperties": False}}
SHAPING = {"allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "stop_token_ids", "ignore_eos", "stop", "stop_sequences"}
"""Fields that conflict with structured output, or end it too early."""


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a path and a valid body."""
    make = draw.choice((completion, completion, chat, chat, chat, response, message))
    return make(draw)


def completion(draw: random.Random) -> tuple[str, dict[str, Any]]:
    body = _draw_few(draw, _optional(draw) | {"echo": True, "logprobs": draw.randint(0, 4)})
    if draw.random() < 0.25:
        body = _free(body) | draw.choice(FORMS)
    text = _text(draw)
    body["prompt"] = draw.choice((text, [text, "another"], [5, 6, 7, 8, 9], [[5, 6], [7, 8, 9]]))
    return "/v1/completions", body


def chat(draw: random.Random) -> tuple[str, dict[str, Any]]:
    effort = {"reasoning_effort": draw.choice(("none", "low", "high"))}
    body = _draw_few(draw, _optional(draw) | effort | {"echo": True, "top_logprobs": draw.randint(0, 4), "logprobs": True})
    if "top_logprobs" in body:
        body["logprobs"] = True
    roles = draw.choice((("user",), ("system", "user"), ("developer", "user"), ("user", "assistant", "user"), ("user", "assistant")))
    text = _text(draw)
    body["messages"] = [{"role": role, "content": text} for role in roles]
    if roles[-1] == "assistant":
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if draw.random() < 0.4:
        forced: Any = draw.choice(("required", {"type": "function", "function": {"name": "weather"}}, "auto", "none"))
        tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": forced, "max_tokens": draw.choice((4, 60))}
        body = _free(body) | draw.choice((*FORMS, tools, tools, tools))
    return "/v1/chat/completions", body


def response(draw: random.Random) -> tuple[str, dict[str, Any]]:
    own = {"instructions": "Be brief.", "reasoning": {"effort": draw.choice(("none", "low"))}, "metadata": {"for": "a test"}}
    own |= {"include": ["message.output_text.logprobs"], "top_logprobs": draw.randint(0, 4)}
    body = _draw_few(draw, {name: value for name, value in _optional(draw).items() if name in ResponsesBody.__struct_fields__} | own)
    body["max_output_tokens"] = body.pop("max_tokens")
    text = _text(draw)
    items: list[Any] = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}, {"role": "developer", "content": "x"}]
    body["input"] = draw.choice((text, items))
    if draw.random() < 0.5:
        form = {"text": {"format": {"type": "json_schema", "name": "city", "schema": FUNCTION["parameters"], "strict": True}}}
        call = {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": draw.choice(("required", {"type": "function", "name": "weather"})),
        }
        body = _free(body) | draw.choice((form, call)) | {"max_output_tokens": draw.choice((4, 60))}
    return "/v1/responses", body


def message(draw: random.Random) -> tuple[str, dict[str, Any]]:
    own = {"system": "Be brief.", "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"}}
    own |= {"stop_sequences": draw.choice((["e"], ["a", "s "], ["日"]))}
    body = _draw_few(draw, {name: value for name, value in _optional(draw).items() if name in MessagesBody.__struct_fields__} | own)
    text = _text(draw)
    turns: list[Any] = [{"role": "user", "content": text}, {"role": "assistant", "content": "It is"}]
    body["messages"] = draw.choice((turns[:1], turns))
    if draw.random() < 0.5:
        tool = {"name": "weather", "input_schema": FUNCTION["parameters"]}
        call = {"tools": [tool], "tool_choice": draw.choice(({"type": "any"}, {"type": "tool", "name": "weather"}))}
        form = {"output_config": {"format": {"type": "json_schema", "schema": FUNCTION["parameters"]}}}
        body = _free(body) | draw.choice((form, call)) | {"max_tokens": draw.choice((4, 60))}
    return "/v1/messages", body


def _text(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))


def _free(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in SHAPING}


def _draw_few(draw: random.Random, optional: dict[str, Any]) -> dict[str, Any]:
    """Return few of the optional fields, so that most combinations are valid."""
    few = draw.sample(sorted(optional), draw.randint(0, 6))
    return {"temperature": 0, "max_tokens": draw.randint(1, 24)} | {name: optional[name] for name in few}


def _optional(draw: random.Random) -> dict[str, Any]:
    """Return fields of completions and chats, and some of the other protocols."""
    return {
        "n": draw.randint(1, 3),
        "stop": draw.choice(("e", ["a", "s "], ["ed", "pre", "\n"], "日")),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "stop_token_ids": draw.sample(range(4, 1000), 40),
        "skip_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logit_bias": {str(draw.randint(4, 1000)): draw.choice((-100, 5, 20))},
        "allowed_token_ids": draw.sample(range(4, 1000), 200),
        "bad_words": ["e", "pre", "sed"],
        "presence_penalty": 1.5,
        "frequency_penalty": -1,
        "repetition_penalty": 1.3,
        "truncate_prompt_tokens": draw.choice((1, 5, -1)),
        "add_special_tokens": draw.random() < 0.5,
        "user": "anna",
        "seed": 7,
    }


async def compare(urls: tuple[str, ...], count: int, seed: int) -> tuple[list[str], int, Counter[str]]:
    """Compare `count` requests. Return the differences, the number that both refused (for example, a too short prompt), and the answers by
    path, with calls and with reasoning."""
    draw = random.Random(seed)
    cases = [(number, urls[number % len(urls)], *request(draw)) for number in range(count)]
    wrong: list[str] = []
    refused, said = 0, Counter[str]()
    left = iter(cases)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:

        async def work() -> None:
            nonlocal refused
            for number, url, path, body in left:
                async with session.post(url + path, json={**body, "cache_salt": f"{seed} {number} whole"}) as response:
                    status, answer = response.status, await response.json()
                streaming = {**body, "cache_salt": f"{seed} {number} stream", "stream": True}
                if path in (COMPLETIONS, CHAT):
                    streaming["stream_options"] = {"include_usage": True}
                async with session.post(url + path, json=streaming) as response:
                    streamed = response.status, await response.text()
                if status != 200:
                    refused += 1
                    if streamed[0] != status:
                        wrong.append(f"{path} {body}: whole {status} {answer}, streamed {streamed}")
                    continue
                said[path] += 1
                try:
                    told, expected = from_stream(path, streamed[1]), from_whole(path, answer)
                    said.update(kind for kind, sign in SIGNS.items() if sign in json.dumps(answer))
                    if not is_close(told, expected):
                        wrong.append(f"{path} {body}:\n  whole    {expected}\n  streamed {told}")
                except (AssertionError, KeyError, IndexError, ValueError) as error:
                    wrong.append(f"{path} {body}: {type(error).__name__} {error}: {streamed[1][-400:]}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return wrong, refused, said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Pair(Path(folder)) as pair:
        wrong, refused, said = asyncio.run(compare(pair.urls, arguments.count, arguments.seed))
    seconds = time.monotonic() - began
    print(f"{arguments.count} requests, whole and streamed, in {seconds:.0f} s: {len(wrong)} differ; {refused} were refused both ways")
    print("answered: " + ", ".join(f"{count} {what}" for what, count in sorted(said.items())))
    for one in wrong[:20]:
        print(one[:2000])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
