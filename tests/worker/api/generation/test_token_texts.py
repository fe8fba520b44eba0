"""Texts, bytes and offsets of log-probabilities: tokens join to the text, for tokenizers of every kind."""

import json
from array import array
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.common.tokenizers_made_here import KINDS, llama2
from tokenizers import Tokenizer, decoders

from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat, digest
from fairlead_worker.api.answers.completions import CompletionLogprobs
from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.logprobs import CompletionLogprobsFormatter, format_chat_logprobs, format_prompt_logprobs
from fairlead_worker.api.generation.sampling import read_options
from fairlead_worker.api.schema import CompletionRequest
from fairlead_worker.ipc.messages import Output, TokenLogprobs

TEXTS = st.lists(
    st.sampled_from(["tide", " tide", "  ", "é", " 漢字", "🙂", "🎉🎊", "\n", ".", " a", "</s", "ﬁn", "naïve", "\u200d", "x" * 9]),
    max_size=12,
).map("".join)


def stripping() -> Tokenizer:
    """Llama 2's decoder: it strips the first space of a text."""
    made = llama2()
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made


MADE: dict[str, Callable[[], Tokenizer]] = KINDS | {"stripping": stripping}
JOINING = [kind for kind in MADE if kind not in ("unigram", "wordpiece")]
"""Kinds whose tokens are the text's bytes. The others fold letters or put spaces between tokens."""


@pytest.fixture(scope="module", params=MADE)
def encoder(request: pytest.FixtureRequest) -> PromptEncoder:
    return encoder_of(request.param)


def encoder_of(kind: str) -> PromptEncoder:
    text = MADE[kind]().to_str()
    return PromptEncoder(
        PromptFormat(
            tokenizer_json=text, tokenizer_digest=digest(text), model_digest="m", model_names=[kind], block_tokens=16, max_model_len=4096
        )
    )


ENCODERS = {kind: encoder_of(kind) for kind in JOINING}


def scores(encoder: PromptEncoder, tokens: Sequence[int], seed: int) -> tuple[TokenLogprobs, ...]:
    """Return log-probabilities with 20 candidates for each token; for every second one the chosen token is among them."""
    size, found = encoder.vocabulary_size, []
    for place, token in enumerate(tokens):
        others = list(dict.fromkeys((seed + 7919 * place + 31 * number * number) % size for number in range(19)))
        others = [other for other in others if other != token]
        ids = [token, *others] if place % 2 else others
        found.append(TokenLogprobs(-0.5, tuple(ids), tuple([-0.5 - number for number in range(len(ids))]), 1))
    return tuple(found)


def answer_of(encoder: PromptEncoder, prompt: Sequence[int], tokens: Sequence[int], batch: int, seed: int = 0) -> OutputDelta:
    """Return the whole answer of these tokens, which come in batches."""
    choice = Choice(encoder, prompt, read_options(CompletionRequest(logprobs=1), {}), ())
    whole, known = OutputDelta(), scores(encoder, tokens, seed)
    finish: Literal["length"] | None
    for start in range(0, len(tokens), batch):
        part = tokens[start : start + batch]
        finish = "length" if start + batch >= len(tokens) else None
        whole.add(choice.process(Output("r", array("I", part).tobytes(), 0, finish, logprobs=known[start : start + batch])))
    return whole


def shown(encoder: PromptEncoder, tokens: Sequence[int], names: Sequence[str]) -> str:
    """Return the names that are text: all but those of special tokens."""
    return "".join(name for token, name in zip(tokens, names, strict=True) if not encoder.token_texts.special_name(token))


def check_keys(logprobs: CompletionLogprobs, known: Sequence[TokenLogprobs], tokens: Sequence[int]) -> None:
    for name, top, each, token in zip(logprobs.tokens, logprobs.top_logprobs, known, tokens, strict=True):
        assert len(top) == len(each.top_ids) + (token not in each.top_ids), "no candidate is lost"
        assert top[name] == each.chosen


@settings(deadline=None)
@given(text=TEXTS, prompt=TEXTS, batch=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_tokens_join_to_the_text(encoder: PromptEncoder, text: str, prompt: str, batch: int, seed: int) -> None:
    before, tokens = encoder.encode_text(prompt).tolist(), encoder.encode_text(text, add_special_tokens=False).tolist()
    answer = answer_of(encoder, before, tokens, batch, seed)
    if not tokens:
        return
    logprobs = CompletionLogprobsFormatter(encoder).format_delta(answer)
    assert logprobs is not None
    assert shown(encoder, tokens, logprobs.tokens) == answer.text
    for name, token, offset in zip(logprobs.tokens, tokens, logprobs.text_offset, strict=True):
        assert encoder.token_texts.special_name(token) or answer.text[offset:].startswith(name)
    check_keys(logprobs, scores(encoder, tokens, seed), tokens)
    chat = format_chat_logprobs(encoder, answer)
    assert chat is not None
    assert [each.token for each in chat.content] == logprobs.tokens
    assert all(each.top_logprobs[0].token == each.token for each in chat.content[1::2])


def test_bytes_of_a_special_token_are_what_it_adds_or_its_name() -> None:
    encoder = encoder_of("wordpiece")
    (unknown,) = encoder.find_special_tokens("<unk>")
    assert [encoder.token_texts.bytes_of(unknown, text) for text in (" <unk>", "", None)] == [b" <unk>", b"<unk>", b"<unk>"]


@pytest.mark.parametrize("kind", JOINING)
@settings(deadline=None)
@given(text=TEXTS, prompt=TEXTS, batch=st.integers(1, 4))
def test_bytes_join_to_the_texts_bytes(kind: str, text: str, prompt: str, batch: int) -> None:
    encoder = ENCODERS[kind]
    tokens = encoder.encode_text(text, add_special_tokens=False).tolist()
    answer = answer_of(encoder, encoder.encode_text(prompt).tolist(), tokens, batch)
    chat = format_chat_logprobs(encoder, answer)
    content = [] if chat is None else chat.content
    written = [bytes(each.bytes) for each, token in zip(content, tokens, strict=True) if not encoder.token_texts.special_name(token)]
    assert b"".join(written) == answer.text.encode()


@settings(deadline=None)
@given(prompt=TEXTS, text=TEXTS)
def test_an_echo_joins_to_prompt_and_answer(encoder: PromptEncoder, prompt: str, text: str) -> None:
    before, tokens = encoder.encode_text(prompt).tolist(), encoder.encode_text(text, add_special_tokens=False).tolist()
    if not before or not tokens:
        return
    answer = answer_of(encoder, before, tokens, 3)
    logprobs = CompletionLogprobsFormatter(encoder).format_echo(before, scores(encoder, before[1:], 1), answer)
    assert shown(encoder, [*before, *tokens], logprobs.tokens) == encoder.decode(before) + answer.text
    answered = CompletionLogprobs(*(getattr(logprobs, name)[1:] for name in logprobs.__struct_fields__))
    check_keys(answered, [*scores(encoder, before[1:], 1), *answer.logprobs], [*before[1:], *tokens])
    entries = format_prompt_logprobs(encoder, before, scores(encoder, before[1:], 1))
    assert [next(iter(each.values()))["decoded_token"] for each in entries[1:] if each] == logprobs.tokens[1 : len(before)]


def test_parts_of_a_character_have_names_of_their_own() -> None:
    encoder = ENCODERS["stripping"]
    table = json.loads(encoder.format.tokenizer_json)["model"]["vocab"]
    half, other = table["<0xE6>"], table["<0xBC>"]
    written, word = next((piece, token) for piece, token in table.items() if piece.startswith("▁") and len(piece) > 1)
    logprobs = CompletionLogprobsFormatter(encoder).format_delta(
        OutputDelta("", [half], [TokenLogprobs(-1.0, (half, other, word), (-1.0, -2.0, -3.0))], [""])
    )
    assert logprobs is not None
    assert logprobs.top_logprobs == [{"": -1.0, "bytes:\\xbc": -2.0, written.replace("▁", " "): -3.0}]


def test_candidates_of_one_text_are_all_there() -> None:
    encoder = ENCODERS["stripping"]
    table = json.loads(encoder.format.tokenizer_json)["model"]["vocab"]
    letter, byte = table["t"], table["<0x74>"]
    for chosen, other in ((letter, byte), (byte, letter)):
        given = OutputDelta("t", [chosen], [TokenLogprobs(-1.0, (other, chosen), (-0.5, -1.0))], ["t"])
        logprobs = CompletionLogprobsFormatter(encoder).format_delta(given)
        assert logprobs is not None and logprobs.top_logprobs == [{f"token_id:{other}": -0.5, "t": -1.0}]
