"""`fairlead chat`: talk at a terminal, or one question from a pipe."""

import contextlib
import sys
import unicodedata
from dataclasses import dataclass
from typing import Annotated

import typer

from fairlead.chat.client import ChatClient, ChatFailed
from fairlead.chat.conversation import Conversation, talk
from fairlead.errors import UserError, check_http_url
from fairlead.options import KeyFile, key_headers, takes
from fairlead.program import describe, new_app
from fairlead.serve import DEFAULT_URL

PROMPT = "> "


app = new_app()


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of `fairlead chat`."""

    url: Annotated[str, typer.Option(metavar="URL", help="URL of the server.")] = DEFAULT_URL
    model: Annotated[str, typer.Option(metavar="NAME", help="Model name (default: the only one of /v1/models).")] = ""
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message.")] = ""
    api_key_file: KeyFile = None


@app.command(
    help=describe(
        "Talk to a model of any OpenAI-compatible server: Ctrl-C stops an answer, Ctrl-D ends. A pipe is one question. "
        "Status 1: the server does not answer; 130: Ctrl-C stopped the answer to a pipe.",
        "fairlead chat",
        "fairlead chat --url https://models.example.com --model qwen --api-key-file key.txt",
        "git diff | fairlead chat --system 'Summarize this change.'",
    )
)
@takes(ChatOptions)
def run(options: ChatOptions) -> int:
    client = ChatClient(check_http_url("--url", options.url), key_headers(options.api_key_file))
    with contextlib.closing(client):
        try:
            model = options.model or client.only_model()
            conversation = Conversation(client, model, options.system, lambda text: print(_printable(text), end="", flush=True))
            if not sys.stdin.isatty():
                return answer_pipe(conversation)
        except ChatFailed as error:
            print(f"fairlead chat: {error}", file=sys.stderr)
            return 1
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() editing and a history
        print(f"{model} at {client.url} · Ctrl-C stops an answer · Ctrl-D ends")
        talk(conversation, lambda: input(PROMPT), lambda text: print(f"\n({text})" if text else "", flush=True))
        print()
    return 0


def answer_pipe(conversation: Conversation) -> int:
    """Answer all of standard input as one question. Raises UserError if it is empty, and ChatFailed."""
    question = sys.stdin.buffer.read().decode(errors="replace").strip()
    if not question:
        raise UserError("standard input is empty: pipe a question, or run it at a terminal")
    is_whole = conversation.ask(question)
    print()
    return 0 if is_whole else 130


def _printable(text: str) -> str:
    """Return the text without control characters, which could change the terminal's state or title."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) != "Cc")
