"""Random right requests, each asked for whole and as a stream: both must say the same, to the last log-probability and token count.

    python -m tests.api.golden --count 500 --seed 1

Temperature 0, and a cache salt of its own for each answer, so that neither finds what the other left.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from tests.api.fleet import Pair

AT_ONCE = 8
CLOSE = 1e-4
"""Of log-probabilities: the sums of a matrix product depend on the batch."""
WORDS = ("hello", "naïve", "日本語", "🎉", "the end", "a b c", "{}", "one two three", "\n\n")
FORMS: tuple[dict[str, Any], ...] = (
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "array", "items": {"type": "integer"}}}}},
    {"structured_outputs": {"regex": "(yes|no|maybe), [a-z]{3}"}},
    {"structured_outputs": {"choice": ["left", "right", "naïve 🎉"]}},
    {"guided_grammar": 'start: "a" rest\nrest: "b" | "c" rest'},
)


def request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body that is right."""
    chat = draw.random() < 0.5
    text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))
    body: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randint(1, 24)}
    optional: dict[str, Any] = {
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
        "echo": True,
        **({"logprobs": True, "top_logprobs": draw.randint(0, 4)} if chat and draw.random() < 0.7 else {}),
        **({"logprobs": draw.randint(0, 4)} if not chat else {}),
    }
    body |= {name: optional[name] for name in draw.sample(sorted(optional), draw.randint(0, 6))}
    if "top_logprobs" in body:
        body["logprobs"] = True
    if draw.random() < 0.25 and not {"allowed_token_ids", "logit_bias", "bad_words", "min_tokens", "stop_token_ids"} & body.keys():
        body |= draw.choice(FORMS)
    if chat:
        roles = draw.choice((("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant")))
        body["messages"] = [{"role": role, "content": text} for role in roles]
        if roles[-1] == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return "/v1/chat/completions", body
    body["prompt"] = draw.choice((text, [text, "another"], [5, 6, 7, 8, 9], [[5, 6], [7, 8, 9]]))
    return "/v1/completions", body


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """A whole answer: its choices by index, its usage, and what stands beside them."""
    choices = {}
    for choice in answer["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        choices[choice["index"]] = {name: choice.get(name) for name in KEPT} | {"text": text}
    return {"choices": choices, "usage": answer["usage"], "beside": answer.get("prompt_token_ids")}


KEPT = ("finish_reason", "stop_reason", "logprobs", "token_ids", "prompt_token_ids")


def gathered(events: list[Any]) -> dict[str, Any]:
    """The same of a stream's events. Raises AssertionError for a stream that is out of order."""
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [], "usage, and then the end"
    choices: dict[int, dict[str, Any]] = {}
    beside = None
    for event in events[:-2]:
        (chunk,) = event["choices"]
        beside = beside or event.get("prompt_token_ids")
        if chunk["index"] not in choices:
            choices[chunk["index"]] = dict.fromkeys(KEPT) | {"text": ""}
            assert "delta" not in chunk or chunk["delta"].get("role") == "assistant", "the role comes first"
        so_far = choices[chunk["index"]]
        assert so_far["finish_reason"] is None, "nothing comes after the finish"
        so_far["text"] += (chunk["delta"].get("content") or "") if "delta" in chunk else chunk["text"]
        so_far["finish_reason"], so_far["stop_reason"] = chunk["finish_reason"], chunk.get("stop_reason")
        so_far["prompt_token_ids"] = so_far["prompt_token_ids"] or chunk.get("prompt_token_ids")
        if "token_ids" in chunk:
            so_far["token_ids"] = [*(so_far["token_ids"] or ()), *chunk["token_ids"]]
        if chunk["logprobs"]:
            before = so_far["logprobs"] or {name: [] for name in chunk["logprobs"]}
            so_far["logprobs"] = {name: _joined(before[name], value) for name, value in chunk["logprobs"].items()}
    assert all(choice["finish_reason"] for choice in choices.values()), "one finish a choice"
    return {"choices": choices, "usage": events[-2]["usage"], "beside": beside}


def _joined(before: Any, more: Any) -> Any:
    return None if more is None else [*before, *more]


def same(one: Any, other: Any) -> bool:
    """Equal, numbers with a fraction nearly."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < CLOSE
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


async def compare(urls: tuple[str, ...], count: int, seed: int) -> tuple[list[str], int]:
    """What differs, and how many requests were refused (a prompt too short for what was asked, and the like: by both alike)."""
    draw = random.Random(seed)
    cases = [(number, urls[number % len(urls)], *request(draw)) for number in range(count)]
    wrong: list[str] = []
    refused = 0
    left = iter(cases)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(300)) as session:

        async def work() -> None:
            nonlocal refused
            for number, url, path, body in left:
                async with session.post(url + path, json={**body, "cache_salt": f"{seed} {number} whole"}) as response:
                    status, answer = response.status, await response.json()
                streaming = {**body, "cache_salt": f"{seed} {number} stream", "stream": True, "stream_options": {"include_usage": True}}
                async with session.post(url + path, json=streaming) as response:
                    streamed = response.status, await response.text()
                if status != 200:
                    refused += 1
                    if streamed[0] != status:
                        wrong.append(f"{path} {body}: whole {status} {answer}, streamed {streamed}")
                    continue
                lines = [line[6:] for line in streamed[1].split("\n") if line.startswith("data: ")]
                try:
                    told, expected = gathered([line if line == "[DONE]" else json.loads(line) for line in lines]), whole(answer)
                    if not same(told, expected):
                        wrong.append(f"{path} {body}:\n  whole    {expected}\n  streamed {told}")
                except (AssertionError, KeyError, IndexError, ValueError) as error:
                    wrong.append(f"{path} {body}: {type(error).__name__} {error}: {streamed[1][-400:]}")

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return wrong, refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Pair(Path(folder)) as pair:
        wrong, refused = asyncio.run(compare(pair.urls, arguments.count, arguments.seed))
    seconds = time.monotonic() - began
    print(f"{arguments.count} requests, whole and streamed, in {seconds:.0f} s: {len(wrong)} differ; {refused} were refused both ways")
    for one in wrong[:20]:
        print(one[:2000])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
