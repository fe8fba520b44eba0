"""`fairlead status --url U --prompt TEXT`: where the router would send a prompt, and each term of the score."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from fairlead.errors import UserError, check_http_url

SECONDS = 10.0
TERMS = ("backlog", "reserved", "work", "step", "price")
"""Their sum is the score. The first four are the expected seconds to the first token."""


def request_body(prompt: str) -> bytes:
    """Return a completion of the prompt, or the file of `@FILE`: the JSON body of a completion or a chat. Raises UserError."""
    if not prompt.startswith("@"):
        return json.dumps({"prompt": prompt}).encode()
    try:
        return Path(prompt[1:]).read_bytes()
    except OSError as error:
        raise UserError(f"--prompt {prompt}: {error.strerror}. Give a text, or @ and a file with the JSON body of a request.") from None


def read_score(url: str, body: bytes, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the router's answer of `/fairlead/score`. Raises UserError with the router's own message."""
    page = f"{check_http_url('--url', url)}/fairlead/score"
    try:
        answer = httpx.post(
            page, content=body, headers={"content-type": "application/json", **(headers or {})}, timeout=SECONDS, trust_env=False
        )
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        reason = str(error).rstrip(".")
        raise UserError(f"{page}: {reason}. Check that a Fairlead router runs there (in a cluster: its admin port, 8082).") from None
    if isinstance(found, dict) and "error" in found:
        raise UserError(f"{page}: {found['error'].get('message', 'an error without a message')}")
    if not isinstance(found, dict) or "workers" not in found:
        raise UserError(f"{page}: not a Fairlead router's answer")
    return found


def show_score(console: Console, found: dict[str, Any]) -> None:
    """Print the workers, best first, with the terms of their scores in seconds."""
    console.print(f"a prompt of {found['prompt_tokens']} tokens, by the {found['source']} view; seconds, the lowest score is next")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("POD")
    for column in ("CACHED", *(term.upper() for term in TERMS), "SCORE", "TTFT"):
        table.add_column(column, justify="right")
    table.add_column("ADDRESS")
    for worker in found["workers"]:
        terms = [f"{worker['terms'][term]:.3f}" for term in TERMS]
        full = "" if worker["fits"] else " (too few free KV pages)"
        figures = (str(worker["cached_tokens"]), *terms, f"{worker['score']:.3f}", f"{worker['ttft']:.3f}")
        table.add_row(worker["pod"] or "?", *figures, f"{worker['address']}{full}")
    console.print(table if found["workers"] else "  no workers")
