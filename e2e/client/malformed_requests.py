"""Runs in the client pod: sends malformed requests, and prints the status and error of each as JSON."""

import http.client
import json
import sys
from urllib.parse import urlsplit

address, model = urlsplit(sys.argv[1]), sys.argv[2]
assert address.hostname
GOOD = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def post(body: bytes) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(str(address.hostname), 80, timeout=60)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def post_huge() -> tuple[int, dict]:
    """Announce 100 MB and send none of it: the refusal must not wait for the body."""
    connection = http.client.HTTPConnection(str(address.hostname), 80, timeout=60)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", str(100 * 1024 * 1024))
    connection.endheaders()
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def post_changed(**changes: object) -> tuple[int, dict]:
    return post(json.dumps({**GOOD, **changes}).encode())


print(
    json.dumps(
        {
            "bad json": post(b'{"model": '),
            "unknown model": post_changed(model="unknown"),
            "negative max_tokens": post_changed(max_tokens=-1),
            "prompt too long": post_changed(messages=[{"role": "user", "content": "word " * 50_000}]),
            "messages is a number": post_changed(messages=7),
            "100 MB": post_huge(),
            "good": post_changed(),
        }
    )
)
