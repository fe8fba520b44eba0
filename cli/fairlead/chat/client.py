"""Chat completions of an OpenAI-compatible server, as they stream."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import httpx

CONNECT_SECONDS = 5.0
READ_SECONDS = 600.0
"""Longest silence of a server, which may wait for a worker or a long prompt."""
MAX_ERROR_CHARACTERS = 300
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

Message = Mapping[str, str]


class ChatFailed(Exception):
    """The server does not answer or refuses. The message is one line: what failed and what to do."""


class ChatClient:
    """One server and one model."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """`url`: without `/v1`."""
        self.url = url
        self._http = httpx.Client(
            base_url=f"{url}/v1/",
            headers=dict(headers),
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            trust_env=httpx.URL(url).host not in LOOPBACK_HOSTS,  # a proxy of the environment cannot reach this machine's own address
        )

    def close(self) -> None:
        self._http.close()

    def only_model(self) -> str:
        """Return the name of the server's model. Raises ChatFailed if it has none or several."""
        try:
            answer = self._http.get("models")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        self._check(answer)
        try:
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ChatFailed(f"{answer.url} is not an OpenAI API: give --url of one") from None
        if len(names) != 1:
            raise ChatFailed(f"{self.url} serves {len(names)} models; give --model, one of: {', '.join(sorted(names)) or '(none)'}")
        return names[0]

    def stream(self, model: str, messages: Sequence[Message]) -> Generator[str, None, None]:
        """Yield the answer's text in pieces. Closing the iterator ends the request. Raises ChatFailed."""
        body = {"model": model, "messages": list(messages), "stream": True}
        try:
            with self._http.stream("POST", "chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                self._check(answer)
                for line in answer.iter_lines():
                    if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                        yield from _texts(data)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code in (401, 403):
            raise ChatFailed(f"{self.url} refuses the key ({answer.status_code}): give --api-key-file with a valid one")
        if answer.status_code != 200:
            raise ChatFailed(f"{answer.url} answered {answer.status_code}: {_message(answer.text)}")

    def _unreachable(self, error: httpx.HTTPError) -> ChatFailed:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ChatFailed(f"{self.url} does not answer ({error}): start `fairlead serve`, or give --url")
        return ChatFailed(f"{self.url} ended the answer: {str(error) or type(error).__name__}")


def _texts(data: str) -> Iterator[str]:
    """Yield the text of one event. Raises ChatFailed for an event with an error."""
    try:
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise ChatFailed(f"the answer ended with an error: {_message(data)}")
        for choice in event.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                yield str(text)
    except (ValueError, AttributeError):
        raise ChatFailed(f"the server sent an event that is no chat completion: {data[:MAX_ERROR_CHARACTERS]}") from None


def _message(text: str) -> str:
    """Return the message of an error body in one line."""
    try:
        found = json.loads(text)["error"]
        text = found["message"] if isinstance(found, dict) else str(found)
    except (ValueError, KeyError, TypeError):
        pass
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]
