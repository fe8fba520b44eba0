"""Runs in the client pod: streams chats until a stop file exists, and prints their outcomes as JSON.

`longest_gap`: the longest time in seconds in which no chat ended.
"""

import argparse
import json
import pathlib
import threading
import time
from collections import Counter
from itertools import pairwise

import openai


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seconds", type=float, default=120, help="stop after this time")
    parser.add_argument("--stop-file", default="", help="stop when this file exists")
    arguments = parser.parse_args()
    stop = pathlib.Path(arguments.stop_file) if arguments.stop_file else None
    deadline = time.monotonic() + arguments.seconds
    client = openai.OpenAI(base_url=arguments.url, api_key="none", max_retries=0, timeout=120)
    outcomes: list[dict] = []
    ends = [time.monotonic()]

    def stream(worker: int) -> None:
        number = 0
        while time.monotonic() < deadline and not (stop and stop.exists()):
            number += 1
            outcomes.append(
                stream_chat(client, arguments.model, f"Client {worker}, chat {number}: tell me about ships.", arguments.max_tokens)
            )
            ends.append(time.monotonic())
            if stop:
                stop.with_name(f"{stop.name}.started").touch()

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(arguments.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends.append(time.monotonic())
    failures = [outcome for outcome in outcomes if outcome["error"]]
    print(
        json.dumps(
            {
                "requests": len(outcomes),
                "failed": len(failures),
                "failures": failures[:200],
                "seconds": ends[-1] - ends[0],
                "longest_gap": max(later - earlier for earlier, later in pairwise(sorted(ends))),
                "pods": sorted({o["pod"] for o in outcomes if o["pod"]}),
                "by_pod": Counter(o["pod"] for o in outcomes if o["pod"]),
            }
        )
    )


def stream_chat(client: openai.OpenAI, model: str, prompt: str, max_tokens: int) -> dict:
    """Stream one chat to its end. An error, a missing finish reason or a truncated stream counts as a failure."""
    outcome = {"at": time.time(), "pod": "", "finish": None, "chunks": 0, "error": ""}
    try:
        raw = client.chat.completions.with_raw_response.create(
            model=model, messages=[{"role": "user", "content": prompt}], max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
        )
        outcome["pod"] = raw.headers.get("x-fairlead-pod", "")
        for chunk in raw.parse():
            outcome["chunks"] += 1
            if chunk.choices and chunk.choices[0].finish_reason:
                outcome["finish"] = chunk.choices[0].finish_reason
        if outcome["finish"] != "length":
            outcome["error"] = f"stream ended with finish_reason={outcome['finish']}"
    except Exception as error:  # any error: a user would have seen it
        outcome["error"] = f"{type(error).__name__}: {error}"[:300]
    return outcome


main()
