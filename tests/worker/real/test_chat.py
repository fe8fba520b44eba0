"""Answers of a trained model: they end by themselves, follow a conversation, and stream without broken characters."""

from typing import Any

import pytest
from tests.worker.api.process import PAGES, WorkerProcess
from tests.worker.real.conftest import Chat

FRANCE = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
PAGE = 16
SPECIAL = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
UNICODE = "Repeat exactly: Zürich, 東京, 🎉🚀, Ελλάδα"


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def finish(answer: dict[str, Any]) -> tuple[str, str | int | None]:
    choice = answer["choices"][0]
    return choice["finish_reason"], choice["stop_reason"]


def test_an_answer_ends_with_the_end_token_and_shows_no_special_token(chat: Chat) -> None:
    answer = chat.ask(FRANCE, return_token_ids=True)
    assert (content(answer), finish(answer)) == (ANSWER, ("stop", None))
    assert answer["choices"][0]["token_ids"][-1] == 2, "the end token is counted and not shown"
    streamed = chat.stream(FRANCE)
    assert "".join(choice["delta"].get("content") or "" for choice in streamed) == ANSWER
    assert streamed[-1]["finish_reason"] == "stop"


def test_log_probabilities_join_to_the_text_and_its_bytes(chat: Chat) -> None:
    answer = chat.ask(UNICODE, ignore_eos=True, max_tokens=40, logprobs=True, top_logprobs=20)
    tokens = [each for each in answer["choices"][0]["logprobs"]["content"] if each["token"] not in SPECIAL]
    assert "".join(each["token"] for each in tokens) == content(answer)
    assert b"".join(bytes(each["bytes"]) for each in tokens).decode(errors="replace") == content(answer)
    assert any(not each["token"] for each in tokens), "a character of several tokens"


def test_ignore_eos_goes_on_to_the_limit(chat: Chat) -> None:
    hidden = chat.ask(FRANCE, ignore_eos=True, max_tokens=16)
    assert finish(hidden) == ("length", None) and hidden["usage"]["completion_tokens"] == 16
    assert content(hidden).startswith(ANSWER) and not any(token in content(hidden) for token in SPECIAL)
    shown = content(chat.ask(FRANCE, ignore_eos=True, max_tokens=16, skip_special_tokens=False))
    assert shown.startswith(f"{ANSWER}<|im_end|>")


def test_min_tokens_forbids_the_end_until_then(chat: Chat) -> None:
    answer = chat.ask(FRANCE, min_tokens=20)
    assert answer["usage"]["completion_tokens"] >= 20 > 8, "the answer alone has 8"
    assert content(answer).startswith(ANSWER) and not any(token in content(answer) for token in SPECIAL)


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_cuts_the_answer(chat: Chat, included: bool) -> None:
    answer = chat.ask(FRANCE, stop=["ance is"], include_stop_str_in_output=included)
    assert (content(answer), finish(answer)) == (f"The capital of Fr{'ance is' if included else ''}", ("stop", "ance is"))


def test_a_second_turn_reuses_the_first_turns_prompt_and_answer(chat: Chat) -> None:
    """The client sends text. Its tokens are those that the engine has generated, so that their pages are found."""
    system = {"role": "system", "content": "You are a patient teacher of geography who answers in one short sentence."}
    first = chat.ask(system, FRANCE, return_token_ids=True)
    told = {"role": "assistant", "content": content(first)}
    second = chat.ask(system, FRANCE, told, "And of Italy?", return_token_ids=True)
    before = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second["prompt_token_ids"][: len(before)] == before
    computed = len(before) - 1  # the last token was never an input
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // PAGE * PAGE
    assert "Rome" in content(second) and finish(second) == ("stop", None)
    third = chat.ask(system, FRANCE, told, "And of Italy?", {"role": "assistant", "content": content(second)}, "And of Spain?")
    computed = len(second["prompt_token_ids"]) + second["usage"]["completion_tokens"] - 1
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // PAGE * PAGE
    assert "Madrid" in content(third)


def test_characters_of_several_tokens_stream_whole(chat: Chat) -> None:
    pieces = [choice["delta"].get("content") or "" for choice in chat.stream(UNICODE, max_tokens=40)]
    text = "".join(pieces)
    assert all(part in text for part in ("Zürich", "🎉🚀", "Ελλάδα"))
    assert "�" not in text.removesuffix("�"), "only the token limit may cut a character"
    assert text == content(chat.ask(UNICODE, max_tokens=40))


def test_a_base_prompt_is_continued_by_text_and_by_tokens(worker: WorkerProcess) -> None:
    text = worker.complete(prompt="The sky is", temperature=0, max_tokens=8)
    tokens = worker.complete(prompt=[504, 6376, 314], temperature=0, max_tokens=8)
    assert text["choices"][0]["text"] == tokens["choices"][0]["text"] and len(text["choices"][0]["text"].split()) > 3


def test_every_page_comes_back(worker: WorkerProcess, chat: Chat) -> None:
    assert chat.ask(FRANCE)
    assert worker.load()["pages_free"] == PAGES
