"""Cached token ids equal computed ones for any tokenizer, text, conversation, cache size and number of threads."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.common.test_encoder import CHATML, LLAMA3, QWEN, TOOLS
from tests.common.tokenizers_made_here import KINDS, SPECIAL, format_of
from tokenizers import Tokenizer

from fairlead_common.prompts import encoder as prompt
from fairlead_common.prompts.encoder import PromptEncoder, PromptError
from fairlead_common.prompts.split_points import SplitPoints, find_affixes
from fairlead_common.prompts.token_cache import ENTRY_OVERHEAD, Key, TokenCache

LLAMA2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %} {{ m['content'] }}{{ eos_token }}"
    "{% else %}[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "llama2": LLAMA2, "qwen": QWEN}
AWKWARD = ["<|a|><", "<|b|>", "<|b|>x", "[c]", "  ", "word", "#one", "##", "<|EOT|>", "<|eot|>", "id|><|start", "<mask>", "[SEP]"]
HALVES = ["<", "|>", "<|", "<|im_", "start|>", "</", "s>", "<s", "<|a|>", "<|b|", "#", "##one", "x<|b|>", "_header_id|>"]
TEXTS = [
    " ",
    "\n",
    "\t",
    "\u00a0",
    "\u3000",
    "▁",
    "é",
    "e\u0301",
    "\u0301",
    "漢字",
    "🙂",
    "👩‍👩‍👧",
    "ﬁ",
    "İ",
    "ß",
    "\u200b",
    "0",
    "1234",
    "don't",
    "words",
]
fragments = st.sampled_from([*SPECIAL, *AWKWARD, *HALVES, *TEXTS, "<think>", "</tool_call>"]) | st.text(max_size=6)
texts = st.lists(fragments, max_size=24).map("".join)


@pytest.fixture(autouse=True)
def always_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "CACHED_FROM", 0)


@cache
def plain(kind: str, template: str = "") -> PromptEncoder:
    return PromptEncoder(format_of(kind, template))


@cache
def cached(kind: str, template: str = "", max_bytes: int = 1 << 20) -> PromptEncoder:
    return PromptEncoder(format_of(kind, template), TokenCache(max_bytes))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=texts, special=st.booleans(), max_bytes=st.sampled_from([0, 6000, 1 << 20]))
def test_cached_text_equals_computed_text(kind: str, text: str, special: bool, max_bytes: int) -> None:
    expected = outcome(plain(kind), text, special)
    for _ in range(2):  # as it is stored, and as it is found
        assert outcome(cached(kind, max_bytes=max_bytes), text, special) == expected


def outcome(encoder: PromptEncoder, text: str, special: bool) -> Any:
    try:
        return list(encoder.encode_text(text, add_special_tokens=special))
    except PromptError as error:
        return error.field


content = st.none() | texts | st.lists(texts.map(lambda text: {"type": "text", "text": text}), max_size=3)
call = st.builds(
    lambda name, text: {"type": "function", "function": {"name": name, "arguments": text}}, texts, texts | st.just('{"city": "é"}')
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": content},
    optional={"tool_calls": st.lists(call, max_size=2), "reasoning_content": texts},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=10, deadline=None)
@given(chat=st.lists(message, min_size=1, max_size=8), tools=st.sampled_from([None, TOOLS]), data=st.data())
def test_a_growing_chat_equals_a_computed_one(kind: str, template: str, chat: list[dict[str, Any]], tools: Any, data: Any) -> None:
    source = TEMPLATES[template]
    for turns in range(1, len(chat) + 1):
        if data.draw(st.booleans(), label="edited"):
            chat[turns // 2]["content"] = data.draw(texts, label="new content")
        given_chat = msgspec.json.decode(msgspec.json.encode(chat[:turns]))
        assert answer(cached(kind, source), given_chat, tools) == answer(plain(kind, source), given_chat, tools)


def answer(encoder: PromptEncoder, chat: Any, tools: Any) -> Any:
    try:
        return list(encoder.encode_chat(chat, tools))
    except PromptError as error:
        return str(error)


CHAT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "awkward"])
def test_chat_markers_are_cut_points_in_every_kind(kind: str) -> None:
    parts = SplitPoints(KINDS[kind]()).split(CHAT)
    assert parts == ["<|im_start|>user\nHello", "<|im_end|>\n", "<|im_start|>assistant\n"]


def test_a_cut_is_used_only_where_it_is_provably_safe() -> None:
    marks = SplitPoints(KINDS["awkward"]()).marks
    assert "[c]" in marks, "the token extends to the right"
    for unsure in ("<|b|>", "<|b|>x", "  ", "word", "#one", "##", "<|EOT|>", "<|start_header_id|>", "<|a|><"):
        assert unsure not in marks
    assert "<mask>" not in SplitPoints(KINDS["roberta"]()).marks, "it takes the space before the cut"
    randomized = Tokenizer.from_str(KINDS["qwen"]().to_str().replace('"dropout":null', '"dropout":0.1'))
    assert SplitPoints(randomized).marks == []


def test_a_tokenizer_with_thousands_of_added_tokens_is_cut_where_its_template_writes_them() -> None:
    tokenizer = KINDS["llama3"]()
    assert len(SplitPoints(tokenizer).marks) == 64
    tokenizer.add_special_tokens(["<|zz_turn|>"])
    assert SplitPoints(tokenizer, ["{{ '<|zz_turn|>' }}"]).marks[0] == "<|zz_turn|>"


@pytest.mark.parametrize(("kind", "around"), [("qwen", (0, 0)), ("llama3", (1, 0)), ("unigram", (0, 1)), ("wordpiece", (1, 1))])
def test_the_tokens_added_around_every_text_are_known(kind: str, around: tuple[int, int]) -> None:
    found = find_affixes(KINDS[kind]())
    assert found is not None and tuple(map(len, found)) == around


def test_the_cache_is_bounded_and_evicts_the_oldest() -> None:
    size = ENTRY_OVERHEAD + 250
    kept = TokenCache(20 * size)
    keys = [Key("t", "", f"{number:04}" * 10) for number in range(100)]
    for key in keys:
        kept.put(key, prompt.array("I", range(10)))
        kept.get(keys[:1])
        assert kept.bytes <= kept.max_bytes
    assert kept.get(keys[:1]) != [None], "used all the time"
    assert kept.get(keys[1:2]) == [None] and kept.get(keys[-1:]) != [None]
    kept.put(Key("t", "", "x" * kept.max_bytes), prompt.array("I"))
    assert kept.get([keys[-1]]) != [None], "a too large entry evicts nothing"


def test_scopes_and_tokenizers_share_no_entries() -> None:
    kept = TokenCache(1 << 20)
    qwen, unigram = PromptEncoder(format_of("qwen"), kept), PromptEncoder(format_of("unigram"), kept)
    for encoder in (qwen, unigram):
        for scope in ("", "tenant-a"):
            before = kept.hit_tokens
            tokens = encoder.encode_text(CHAT, False, scope)
            assert kept.hit_tokens == before
            assert encoder.encode_text(CHAT, False, scope) == tokens and kept.hit_tokens == before + len(tokens)


def test_threads_that_share_a_cache_get_the_computed_tokens() -> None:
    conversations = [[{"role": "user", "content": f"{who} says {number} " * 9} for number in range(12)] for who in ("Ann", "Bob", "Cy")]
    expected = [list(plain("qwen", CHATML).encode_chat(chat)) for chat in conversations]
    encoder = PromptEncoder(format_of("qwen", CHATML), TokenCache(8000))  # too small for all of them: entries come and go
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: list(encoder.encode_chat(conversations[number % 3])), range(120)))
    assert all(tokens == expected[number % 3] for number, tokens in enumerate(answers))
