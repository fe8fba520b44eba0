"""How to call a local server."""

import json
import shlex


def curl_command(url: str, model: str, *, needs_key: bool) -> str:
    """Return a command to paste that sends a chat to the server at `url`."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32})
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    return f"curl -s {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}"
