"""`fairlead chat`: talk at a terminal, or one question from a pipe."""

import argparse
import contextlib
import sys
from pathlib import Path

from fairlead.chat.client import ChatClient, ChatFailed
from fairlead.chat.conversation import Conversation, talk
from fairlead.errors import UserError, check_http_url
from fairlead.serve import DEFAULT_URL

PROMPT = "> "


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to a model of any OpenAI-compatible server")
    parser.add_argument("--url", default=DEFAULT_URL, metavar="URL", help=f"URL of the server (default {DEFAULT_URL})")
    parser.add_argument("--model", default="", metavar="NAME", help="model name (default: the only one of /v1/models)")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with an API key, for servers that require one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if the server does not answer, and 130 if Ctrl-C stopped the answer to a pipe. Raises UserError."""
    client = ChatClient(check_http_url("--url", arguments.url), key_headers(arguments.api_key_file))
    with contextlib.closing(client):
        try:
            model = arguments.model or client.only_model()
            conversation = Conversation(client, model, arguments.system, lambda text: print(text, end="", flush=True))
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
    question = sys.stdin.read().strip()
    if not question:
        raise UserError("standard input is empty: pipe a question, or run it at a terminal")
    is_whole = conversation.ask(question)
    print()
    return 0 if is_whole else 130


def key_headers(file: Path | None) -> dict[str, str]:
    """Return the Authorization header of the key in `file`; nothing without a file. Raises UserError."""
    if file is None:
        return {}
    try:
        return {"Authorization": f"Bearer {file.read_text().strip()}"}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from None
