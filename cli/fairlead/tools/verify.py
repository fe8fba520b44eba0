"""`fairlead verify URL`: test that a service answers and that its prefix cache works. `helm test` runs it.

It sends one streamed completion with a new prompt, then the same again: the second must report cached tokens.
"""

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx
import typer

from fairlead.console import make_console
from fairlead.errors import UserError, check_http_url
from fairlead.options import KeyFile, Output, key_headers, print_data, takes
from fairlead.program import describe, new_app

STORY = "A fairlead is the ring that guides a rope where it should run, so that it neither chafes nor tangles. "
REPETITIONS = 12  # some hundred tokens: several blocks of any usual size
ATTEMPTS = 5  # repetitions until one must hit the cache: the index may lag a little, and policies such as Random ignore it
PAUSE = 2.0  # seconds between two attempts


class NotServing(Exception):
    """No worker serves now. A later attempt may succeed."""


@dataclass(frozen=True)
class Answer:
    """One streamed completion."""

    pieces: int  # events with text
    first_token: float  # seconds
    prompt_tokens: int
    cached_tokens: int


app = new_app()


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The options of `fairlead verify`."""

    url: Annotated[str, typer.Argument(metavar="URL", help="URL of the OpenAI API, such as http://qwen.default.svc/v1.")] = ""
    url_option: Annotated[str, typer.Option("--url", metavar="URL", help="The same, as an option.")] = ""
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model name (default: the first of /v1/models).")] = None
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds until the service must answer.")] = 60.0
    api_key_file: KeyFile = None
    output: Output = "table"


@app.command(
    help=describe(
        "Test a service: send one completion twice; the second must hit the prefix cache. Exit status 1 if it does not.",
        "fairlead verify http://127.0.0.1:8080/v1",
        "fairlead verify --url https://llm.example.com --api-key-file key.txt -o json",
    )
)
@takes(VerifyOptions)
def run(options: VerifyOptions) -> int:
    """Return 1 if the cache is not hit. Raises UserError if no completion arrives."""
    console, answers = make_console(), list[Answer]()

    def say(text: str) -> None:
        if options.output == "table":
            console.print(text, soft_wrap=True, markup=False, highlight=False)

    url = options.url or options.url_option
    if not url:
        raise UserError("no URL: give that of the service, as in `fairlead verify http://127.0.0.1:8080/v1`")
    base_url = check_http_url("URL", url) + "/v1/"
    with httpx.Client(base_url=base_url, headers=key_headers(options.api_key_file), timeout=120.0, trust_env=False) as client:
        status = verify(client, options.model or "", time.monotonic() + options.wait, say, answers.append)
    if options.output != "table":
        print_data({"url": url, "hit": status == 0, "answers": [asdict(answer) for answer in answers]}, options.output)
    return status


def verify(
    client: httpx.Client, model: str, deadline: float, say: Callable[[str], None], keep: Callable[[Answer], None] = lambda _: None
) -> int:
    """Send the prompt until it is answered or `deadline` (time.monotonic) passes, then repeat it. Raises UserError."""
    prompt = f"{secrets.token_hex(8)}: {STORY * REPETITIONS}"
    first = _answer(client, model, prompt, deadline, say)
    keep(first)
    say(f"first:  {_describe(first)}")
    for _ in range(ATTEMPTS):
        second = _answer(client, model, prompt, deadline, say)
        keep(second)
        say(f"second: {_describe(second)}")
        if second.cached_tokens > first.cached_tokens:
            say("the second hit the cache of the first")
            return 0
        time.sleep(PAUSE)
    say(
        f"{ATTEMPTS} repetitions did not hit the cache of the first. Check that spec.routing.policy is PrefixAware and status.index is Ok. "
        f"See docs/operate/alerts.md, FairleadPredictionsWrong"
    )
    return 1


def _answer(client: httpx.Client, model: str, prompt: str, deadline: float, say: Callable[[str], None]) -> Answer:
    """Send the prompt, again until `deadline` while no worker serves. Raises UserError."""
    last = ""
    while True:
        try:
            return _complete(client, model or _model(client), prompt)
        except (httpx.TransportError, NotServing) as error:
            words = f"{type(error).__name__}: {error}" if isinstance(error, httpx.TransportError) else str(error)
            if time.monotonic() > deadline:
                raise UserError(f"{client.base_url} does not answer: {words}. `kubectl fairlead explain NAME` says why") from None
            if words != last:
                say(f"not yet: {words}")
            last = words
            time.sleep(PAUSE)


def _model(client: httpx.Client) -> str:
    answer = client.get("models")
    _check(answer)
    try:
        names = [str(one["id"]) for one in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{answer.url} is not an OpenAI API: it answers {answer.text[:100]!r}. Give the URL of the service") from None
    if not names:
        raise NotServing("/v1/models lists no model")
    return names[0]


def _complete(client: httpx.Client, model: str, prompt: str) -> Answer:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    began = time.monotonic()
    pieces, first, usage = 0, 0.0, None
    with client.stream("POST", "completions", json={**body, "stream_options": {"include_usage": True}}) as answer:
        if answer.status_code != 200:
            answer.read()
        _check(answer)
        for event in _events(answer):
            if "error" in event:
                raise UserError(f"the stream ended with an error: {event['error'].get('message', event['error'])}")
            if event.get("choices"):
                first = first or time.monotonic() - began
                pieces += 1
            usage = event.get("usage") or usage
    if not pieces or usage is None:
        raise UserError(f"the stream of {client.base_url} ended after {pieces} pieces, {'without' if usage is None else 'with'} usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(pieces, first, int(usage["prompt_tokens"]), int(cached))


def _events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _check(answer: httpx.Response) -> None:
    """Raise NotServing for statuses that pods cause while they start, UserError for other errors."""
    if answer.status_code in (404, 429, 502, 503, 504):
        raise NotServing(f"{answer.status_code} {answer.text[:200]}")
    if answer.status_code in (401, 403):
        raise UserError(f"{answer.url} requires an API key: give --api-key-file (in the chart: test.keySecret)")
    if answer.status_code != 200:
        raise UserError(f"{answer.url} answered {answer.status_code}: {answer.text[:300]}")


def _describe(answer: Answer) -> str:
    return (
        f"{answer.pieces} pieces, the first after {answer.first_token * 1000:.0f} ms, "
        f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens from the cache"
    )
