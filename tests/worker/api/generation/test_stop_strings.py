"""Stop strings and detokenization, token by token, without a process."""

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from fairlead_common.prompts.detokenizer import TextStream
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_worker.api.generation.choice import Choice, SequenceFailed
from fairlead_worker.api.generation.sampling import read_options
from fairlead_worker.api.generation.stop_strings import StopScanner
from fairlead_worker.api.schema import CompletionRequest
from fairlead_worker.ipc.messages import Output

SHORT = st.text("ab ", max_size=4)


@given(pieces=st.lists(st.text("ab ", max_size=5), max_size=12), stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_wherever_it_is_split(pieces: list[str], stops: list[str]) -> None:
    scanner, shown, found = StopScanner(stops), "", None
    for piece in pieces:
        text, found = scanner.feed(piece)
        shown += text
        assert not any(stop in shown for stop in stops)
        if found:
            break
    whole = "".join(pieces)
    if found:
        assert whole.startswith(shown + found)
    else:
        assert shown + scanner.flush() == whole
        assert not any(stop in whole for stop in stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["\n\nUser:", "END"])
    assert scanner.feed("hello") == ("hello", None)
    assert scanner.feed(" E") == (" ", None)
    assert scanner.feed("N") == ("", None)
    assert scanner.feed("X\n") == ("ENX", None)
    assert scanner.feed("\nUse") == ("", None)
    assert scanner.feed("r: hi") == ("", "\n\nUser:")


@pytest.fixture(scope="module")
def encoder(model: Path) -> PromptEncoder:
    text = (model / "tokenizer.json").read_text()
    return PromptEncoder(
        PromptFormat(tokenizer_json=text, tokenizer_digest="t", model_digest="m", model_names=["m"], block_tokens=64, max_model_len=4096)
    )


def _choice(encoder: PromptEncoder, **fields: Any) -> Choice:
    request = read_options(CompletionRequest(max_tokens=99, **fields), {})
    return Choice(encoder, encoder.encode_text("prompt"), request, (1,))


def _output(tokens: list[int], finish: str | None = None, **more: object) -> Output:
    return Output("r", array("I", tokens).tobytes(), 0, finish, **more)  # type: ignore[arg-type]  # checked by the tests themselves


def test_no_half_characters(encoder: PromptEncoder) -> None:
    text = "naïve 🎉🎊 日本語, done"
    tokens = encoder.encode_text(text).tolist()
    written = [encoder.token_texts.bytes_of(token) for token in tokens]
    assert any(len(each) == 1 and each[0] > 127 for each in written)
    choice = _choice(encoder)
    pieces = [choice.process(_output([token])).text for token in tokens[:-1]]
    pieces.append(choice.process(_output(tokens[-1:], "length")).text)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert b"".join(written) == text.encode()


def byte_fallback() -> Tokenizer:
    """A tokenizer like those of Llama 2 and Gemma: a token for each byte beside those for words, and spaces as U+2581."""
    vocabulary = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}, "\u2581a": 258, "b": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def test_no_half_characters_of_byte_tokens() -> None:
    tokenizer, text = byte_fallback(), "é🎉 日本"
    stream = TextStream(lambda tokens, skip_special_tokens=True: tokenizer.decode(list(tokens), skip_special_tokens))
    pieces = [stream.push([258]), *(stream.push([2 + byte]) for byte in text.encode()), stream.push([259])]
    assert "".join(pieces) + stream.finish() == f"a{text}b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert max(map(len, pieces)) == 1, "each character as soon as it is whole"


@pytest.mark.parametrize("token", [1, 2 + 0xFF, 2 + 0xE6], ids=["special", "no-utf8", "half"])
def test_tokens_without_text_do_not_pile_up(token: int) -> None:
    """Otherwise each of them would be decoded again with every later token."""
    tokenizer, decoded = byte_fallback(), 0

    def decode(tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded = max(decoded, len(tokens))
        return tokenizer.decode(list(tokens), skip_special_tokens)

    stream = TextStream(decode)
    text = stream.push([258]) + "".join(stream.push([token]) for _ in range(1000)) + stream.push([258]) + stream.finish()
    assert decoded < 200
    assert (text.startswith("a") and text.endswith(" a")) and set(text[1:-2]) <= {"\ufffd"}


def test_an_incomplete_character_at_the_end_is_shown_as_such(encoder: PromptEncoder) -> None:
    tokens = encoder.encode_text("ok 🎉").tolist()[:-1]
    choice = _choice(encoder)
    assert choice.process(_output(tokens, "length")).text == "ok \ufffd"


@pytest.mark.parametrize("batch", [1, 2, 3, 50])
def test_where_a_stop_string_ends_does_not_depend_on_batches(encoder: PromptEncoder, batch: int) -> None:
    tokens = encoder.encode_text("one two three four five six").tolist()
    choice = _choice(encoder, stop=["ree f"])
    text = ""
    for at in range(0, len(tokens), batch):
        text += choice.process(_output(tokens[at : at + batch])).text
        if choice.finish_reason:
            break
    assert (text, choice.finish_reason, choice.stop_reason) == ("one two th", "stop", "ree f")
    assert encoder.decode(tokens[: choice.tokens]).startswith("one two three f")


def test_stop_strings_wait_for_min_tokens(encoder: PromptEncoder) -> None:
    tokens = encoder.encode_text("a b a b a b").tolist()
    choice = _choice(encoder, stop=["b"], min_tokens=len(tokens) - 1)
    assert choice.process(_output(tokens, "length")).text == "a b a b a "


def test_stop_tokens_are_counted_and_not_shown(encoder: PromptEncoder) -> None:
    tokens = encoder.encode_text("a word").tolist()
    choice = _choice(encoder)
    assert choice.process(_output([*tokens, 1], "stop", stop_token=1)).text == "a word"
    assert (choice.tokens, choice.finish_reason, choice.stop_reason) == (len(tokens) + 1, "stop", None)
    choice = _choice(encoder)
    assert choice.process(_output(tokens, "stop", stop_token=tokens[-1])).text == encoder.decode(tokens[:-1])
    assert choice.stop_reason == tokens[-1]


def test_an_engine_error_is_an_error(encoder: PromptEncoder) -> None:
    with pytest.raises(SequenceFailed, match="out of luck"):
        _choice(encoder).process(_output([], "error", error="out of luck"))
