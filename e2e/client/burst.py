"""Runs in the client pod: sends many requests at once, every second one a stream, and prints the outcome of each kind as JSON.

The comments of a stream (`: held`) are counted: they keep clients and load balancers from giving up while no worker is ready. A request
that is refused with 503 and Retry-After is sent again, as often as it is refused.
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
gate = threading.Barrier(count)
"""All at once: two hundred clients made one after the other take longer than a worker takes to wake."""


def ask(http: httpx.Client, number: int) -> dict:
    body = {
        "model": model,
        "prompt": f"Request {number} of ropes and rings.",
        "max_tokens": 8,
        "ignore_eos": True,
        "stream": number % 2 == 0,
    }
    found = {"outcome": "", "held": 0, "told": 0, "longest_silence": 0.0}
    while True:
        with http.stream("POST", f"{url}/completions", json=body) as answer:
            if answer.status_code == 503 and answer.headers.get("retry-after", "").isdigit():
                answer.read()
                found["told"] += 1
                wait = int(answer.headers["retry-after"])
                if time.monotonic() + wait > deadline:
                    return {**found, "outcome": "told until the end"}
                time.sleep(wait)
                continue
            lines, last = [], time.monotonic()
            for line in answer.iter_lines():
                found["longest_silence"] = max(found["longest_silence"], time.monotonic() - last)
                last = time.monotonic()
                lines.append(line)
        found["held"] = lines.count(": held")
        said = "\n".join(lines)
        whole = "data: [DONE]" in lines and '"finish_reason":"length"' in said.replace(" ", "") if body["stream"] else '"choices"' in said
        found["outcome"] = "answered" if answer.status_code == 200 and whole else f"{answer.status_code}: {said[-300:]}"
        return found


def one(http: httpx.Client, number: int) -> dict:
    try:
        gate.wait(timeout=60)
        return {"stream": number % 2 == 0, **ask(http, number)}
    except Exception as error:  # whatever it is, a user would have seen it
        return {
            "stream": number % 2 == 0,
            "outcome": f"{type(error).__name__}: {error}"[:300],
            "held": 0,
            "told": 0,
            "longest_silence": 0.0,
        }


began = time.monotonic()
everybody = httpx.Limits(max_connections=count)
with httpx.Client(timeout=httpx.Timeout(seconds, connect=30), limits=everybody) as client, ThreadPoolExecutor(count) as threads:
    all_of_them = list(threads.map(partial(one, client), range(count)))
print(
    json.dumps(
        {
            "seconds": time.monotonic() - began,
            "answered": sum(one["outcome"] == "answered" for one in all_of_them),
            "told": sum(one["told"] > 0 for one in all_of_them),
            "streams_held": sum(one["stream"] and one["held"] > 0 for one in all_of_them),
            "longest_silence": max(one["longest_silence"] for one in all_of_them if one["stream"]),
            "lost": [one["outcome"] for one in all_of_them if one["outcome"] != "answered"][:10],
        }
    )
)
