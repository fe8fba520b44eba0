"""Runs in the client pod: sends many requests at once, every second one a stream, and prints the outcomes as JSON.

It counts the comments of a stream (`: held`), which keep clients and load balancers from giving up while no worker is ready. A request that
is refused with 503 and Retry-After is sent again, as often as it is refused.
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2 as httpx  # the one that the openai package brings

url, model, count, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
deadline = time.monotonic() + seconds
start = threading.Barrier(count)
"""Releases all requests together: creating two hundred clients in turn takes longer than a worker takes to start."""


def send(http: httpx.Client, number: int) -> dict:
    body = {
        "model": model,
        "prompt": f"Request {number} about ships.",
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    found = {"outcome": "", "held": 0, "refused": 0, "longest_silence": 0.0}
    while True:
        with http.stream("POST", f"{url}/completions", json=body) as answer:
            if answer.status_code == 503 and answer.headers.get("retry-after", "").isdigit():
                answer.read()
                found["refused"] += 1
                wait = int(answer.headers["retry-after"])
                if time.monotonic() + wait > deadline:
                    return {**found, "outcome": "refused until the end"}
                time.sleep(wait)
                continue
            lines, last = [], time.monotonic()
            for line in answer.iter_lines():
                found["longest_silence"] = max(found["longest_silence"], time.monotonic() - last)
                last = time.monotonic()
                lines.append(line)
        found["held"] = lines.count(": held")
        text = "\n".join(lines)
        complete = (
            "data: [DONE]" in lines and '"finish_reason":"length"' in text.replace(" ", "") if body["stream"] else '"choices"' in text
        )
        found["outcome"] = "answered" if answer.status_code == 200 and complete else f"{answer.status_code}: {text[-300:]}"
        return found


def send_when_all_are_ready(http: httpx.Client, number: int) -> dict:
    try:
        start.wait(timeout=60)
        return {"stream": number % 2 == 0, **send(http, number)}
    except Exception as error:  # any error: a user would have seen it
        return {
            "stream": number % 2 == 0,
            "outcome": f"{type(error).__name__}: {error}"[:300],
            "held": 0,
            "refused": 0,
            "longest_silence": 0.0,
        }


began = time.monotonic()
limits = httpx.Limits(max_connections=count)
with httpx.Client(timeout=httpx.Timeout(seconds, connect=30), limits=limits) as client, ThreadPoolExecutor(count) as threads:
    outcomes = list(threads.map(partial(send_when_all_are_ready, client), range(count)))
print(
    json.dumps(
        {
            "seconds": time.monotonic() - began,
            "answered": sum(one["outcome"] == "answered" for one in outcomes),
            "refused": sum(one["refused"] > 0 for one in outcomes),
            "streams_held": sum(one["stream"] and one["held"] > 0 for one in outcomes),
            "longest_silence": max(one["longest_silence"] for one in outcomes if one["stream"]),
            "failed": [one["outcome"] for one in outcomes if one["outcome"] != "answered"][:10],
        }
    )
)
