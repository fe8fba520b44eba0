"""Runs in a client pod: connects to each HOST:PORT of its arguments, and prints the outcome of each as JSON.

Outcomes: `open`, `prohibited` (by a policy), or an error's name.
"""

import errno
import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor


def connect(address: str) -> str:
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=10):
            return "open"
    except OSError as error:
        return "prohibited" if error.errno == errno.EHOSTUNREACH else type(error).__name__


with ThreadPoolExecutor(32) as threads:
    print(json.dumps(dict(zip(sys.argv[1:], threads.map(connect, sys.argv[1:]), strict=True))))
