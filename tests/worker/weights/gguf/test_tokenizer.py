"""Tokenizers of GGUF files: the tokens of transformers' own reading of the same file, in worker and router, and llama.cpp's rules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.gguf_models import SPECIAL, byte_alphabet, small_model, write_gguf
from tests.real_models import GEMMA3, real_folder, real_model
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from fairlead.packaged_model import SMOLLM2, PackagedModel
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.gguf.splits import SPLITS
from fairlead_worker.weights.uri import resolve

TEXTS = [
    "Hello world",
    "  leading, double  and trailing spaces  ",
    "\n\n\n lines\r\n\ttabs\t\t\n and    indented\n        code",
    "def f(x: int) -> str:\n    return f'{x:>10}'  # 3.14159e-10",
    "1234567890 12 345 -6,789.00 0x1F",
    "It's we'll I'M DON'T they'Re",
    "naïve café Straße ÑANDÚ ﬁ",
    "日本語のテキスト、中文 한국어 ไทย العربية हिन्दी",
    "😀 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \u200b \u00a0\u2003",
    "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>model\n<end_of_turn>",
    "<unk> </s> <pad> <0x0A> ▁ Ġ [multimodal] </iframe> <unused7>",
    "a" * 60 + " " * 40 + "=" * 33 + "\x00\x01\x7f",
    "",
    " ",
]


def described(path: Path, tmp_path: Path) -> Path:
    return resolve(path.as_uri(), cache=ModelCache(tmp_path / "cache"))


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA3], ids=lambda model: model.name)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return our tokenizer of a real file, and transformers' one."""
    model: PackagedModel = request.param
    folder = described(real_model(model), tmp_path_factory.mktemp("real"))
    theirs = real_folder(model, "float32")  # converted from the file by transformers
    return AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(theirs)


def test_real_files_give_the_tokens_of_transformers(real: tuple[Any, Any]) -> None:
    ours, theirs = real
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_tokens_map == {name: theirs.special_tokens_map[name] for name in ours.special_tokens_map}
    assert ours.chat_template == theirs.chat_template


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs", "Nd", "Nl", "No")), max_size=60))
def test_any_text_gives_the_tokens_of_transformers(real: tuple[Any, Any], text: str) -> None:
    """Digits beyond ASCII are left out: see the next test."""
    ours, theirs = real
    assert ours(text).input_ids == theirs(text).input_ids


def test_router_and_worker_encode_as_transformers_does(real: tuple[Any, Any]) -> None:
    """Both use a PromptEncoder of the worker's PromptFormat. Long texts are cut at points where the tokens stay the same."""
    ours, theirs = real
    made = PromptFormat.from_tokenizer(ours, model_digest="m", model_names=["m"], block_tokens=16, max_model_len=8192)
    for encoder in (PromptEncoder(made), PromptEncoder(made, TokenCache(1 << 22))):
        for text in (*TEXTS, "\n".join(TEXTS) * 8):
            assert list(encoder.encode_text(text)) == theirs(text).input_ids
    if theirs.chat_template:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "12 × 30?"}]
        want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(PromptEncoder(made).encode_chat(messages)) == want


def test_digits_of_any_script_are_split_as_the_model_was_trained(tmp_path: Path) -> None:
    """`smollm` splits every digit. transformers' reader keeps GPT-2's rule, which joins them with the space before."""
    pieces = Tokenizer.from_file(str(described(real_model(SMOLLM2), tmp_path) / "tokenizer.json")).pre_tokenizer.pre_tokenize_str("a 12½")
    assert [offsets for _, offsets in pieces] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]


def with_vocabulary(tmp_path: Path, write: Callable[[GGUFWriter], object], architecture: str = "llama") -> Path:
    """Return the folder of a model whose tokenizer `write` writes."""
    from tests import gguf_models

    path = tmp_path / "m.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_models, "add_vocabulary", lambda writer, size: write(writer))
        write_gguf(small_model(architecture), path)
    return described(path, tmp_path)


def sentencepiece(writer: GGUFWriter, **flags: bool) -> None:
    words = ["▁", "a", "b", "c", "ab", "▁a", "▁ab", "bc", "abc"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<think>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(words), 4])
    writer.add_token_scores([0.0] * 259 + [-9.0, -9.0, -9.0, -9.0, -3.0, -2.0, -4.0, -1.0, -5.0] + [0.0])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name, value in flags.items():
        getattr(writer, f"add_{name}")(value)


def test_sentencepiece_merges_the_best_score_first_and_falls_back_to_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(with_vocabulary(tmp_path, sentencepiece) / "tokenizer.json"))
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"], "bc (-1), then ▁a (-2), and no token joins these"
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab é").ids) == "ab é"


def test_a_leading_space_follows_each_special_token_as_in_llama_cpp(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(with_vocabulary(tmp_path, sentencepiece) / "tokenizer.json"))
    assert tokenizer.encode("a</s>a<think>a", add_special_tokens=False).tokens == ["▁a", "</s>", "▁a", "<think>", "▁a"]


def test_flags_of_the_file_decide_on_spaces_and_special_tokens(tmp_path: Path) -> None:
    flags = {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True}
    folder = with_vocabulary(tmp_path, lambda writer: sentencepiece(writer, **flags))
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab").tokens == ["ab", "</s>"]


def byte_level(pre: str, **fields: Any) -> Callable[[GGUFWriter], None]:
    def write(writer: GGUFWriter) -> None:
        tokens = [*SPECIAL, *byte_alphabet(), "Ġ1", "12"]
        writer.add_tokenizer_model(fields.get("model", "gpt2"))
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(fields.get("tokens", tokens))
        writer.add_token_types(fields.get("types", [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL))))
        writer.add_token_merges(fields.get("merges", ["Ġ 1", "1 2"]))
        writer.add_eos_token_id(fields.get("eos", 1))

    return write


@pytest.mark.parametrize("pre", SPLITS)
def test_every_split_loads_and_loses_no_text(pre: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(with_vocabulary(tmp_path, byte_level(pre)) / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


PIECES = {
    "gpt-2": ["it", "'s", " 1234", " DON", "'", "T", "  ", " x", "\n\n", " y"],
    "smollm": ["it", "'s", " ", "1", "2", "3", "4", " DON", "'", "T", "  ", " x", "\n\n", " y"],
    "qwen2": ["it", "'s", " ", "1", "2", "3", "4", " DON", "'T", "  ", " x", "\n\n", " y"],
    "llama-bpe": ["it", "'s", " ", "123", "4", " DON", "'T", "  ", " x", "\n\n", " y"],
    "tekken": ["it", "'s", " ", "1", "2", "3", "4", " DON", "'T", "  ", " x", "\n\n", " y"],
    "gpt-4o": ["it's", " ", "123", "4", " DON'T", "  ", " x", "\n\n", " y"],
    "deepseek-v3": ["it", "'s", " ", "123", "4", " DON", "'T", "  ", " x", "\n\n", " y"],
    "falcon": ["it", "'", "s", " ", "123", "4", " DON", "'", "T", "  ", " x", "\n\n", " y"],
}


@pytest.mark.parametrize("pre", PIECES)
def test_splits_are_those_of_the_models(pre: str, tmp_path: Path) -> None:
    text = "it's 1234 DON'T   x\n\n y"
    tokenizer = Tokenizer.from_file(str(with_vocabulary(tmp_path, byte_level(pre)) / "tokenizer.json"))
    assert [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == PIECES[pre]


def long_token(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "a" * 1025])


def array_for(name: str) -> Callable[[GGUFWriter], None]:
    def write(writer: GGUFWriter) -> None:
        byte_level("gpt-2")(writer)
        writer.add_array(f"tokenizer.ggml.{name}", ["gpt2"])

    return write


REFUSED = {
    "an unknown split": (byte_level("grok-9"), "tokenizer.ggml.pre 'grok-9' is not supported"),
    "another kind": (byte_level("gpt-2", model="bert"), "tokenizer.ggml.model 'bert' is not supported"),
    "a token twice": (byte_level("gpt-2", tokens=["a", "a"]), "tokenizer.ggml.tokens is empty or names a token twice"),
    "a spelling twice": (
        byte_level("gpt-2", tokens=["Ġ", " "], types=[1, 1]),
        "tokenizer.ggml.tokens has 'Ġ' (0) and ' ' (1), both for 'Ġ'",
    ),
    "a token without end": (long_token, "tokenizer.ggml.tokens has a token of 1025 characters"),
    "several kinds": (array_for("model"), "tokenizer.ggml.model is ['gpt2'], not a text"),
    "several splits": (array_for("pre"), "tokenizer.ggml.pre is ['gpt2'], not a text"),
    "too many tokens": (byte_level("gpt-2", tokens=[f"t{n}" for n in range(600)]), "has 600 tokens, and token_embd.weight 512 rows"),
    "too few types": (byte_level("gpt-2", types=[1, 1]), "tokenizer.ggml.token_type is no array of"),
    "a merge of nothing": (byte_level("gpt-2", merges=["x yz"]), "tokenizer.ggml.merges has 'x yz'"),
    "no merges": (byte_level("gpt-2", merges=[]), "tokenizer.ggml.merges is missing or empty"),
    "EOS beyond the vocabulary": (byte_level("gpt-2", eos=70000), "tokenizer.ggml.eos_token_id is 70000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_cannot_be_right_is_refused(case: str, tmp_path: Path) -> None:
    write, cause = REFUSED[case]
    with pytest.raises(ModelLoadError) as refused:
        with_vocabulary(tmp_path, write)
    assert cause in refused.value.cause and "m.gguf: " in refused.value.cause


def test_answers_end_at_every_token_that_ends_a_turn(tmp_path: Path) -> None:
    folder = with_vocabulary(tmp_path, byte_level("gpt-2"))
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, SPECIAL.index("<|im_end|>")]
