"""Folders with `tokenizer.model` or `tekken.json` only: the token ids are those of the libraries that wrote the files."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.worker.api.process import WorkerProcess
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from fairlead.random_model.build import make_model
from fairlead_common.prompts.encoder import PromptEncoder, PromptFormat
from fairlead_worker.grammar.checker import check
from fairlead_worker.grammar.compiler import Compiler
from fairlead_worker.grammar.constraint import Constraint
from fairlead_worker.weights.tokenizer import load_tokenizer

DATA = Path(__file__).parent / "tokenizer_data"
EXPECTED = json.loads((DATA / "expected.json").read_text())
LOSSY = ("unigram", "bytes", "normalized")
"""They drop characters or spaces by their own rules."""
NAMES = list(EXPECTED["ids"])
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    load_tokenizer.cache_clear()
    yield
    load_tokenizer.cache_clear()


def make_folder(folder: Path, name: str, settings: dict[str, Any] | None = None, config: bool = True) -> Path:
    found = DATA / f"{name}.model"
    shutil.copy(found if found.is_file() else DATA / f"{name}.json", folder / ("tokenizer.model" if found.is_file() else "tekken.json"))
    if config:
        (folder / "config.json").write_text('{"model_type": "llama"}')
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_files_own_library(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, name))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in EXPECTED["texts"]]
    for text, mine, theirs in zip(EXPECTED["texts"], ids, EXPECTED["ids"][name], strict=True):
        assert mine == theirs, text
    if name not in LOSSY:
        assert [tokenizer.decode(each) for each in ids] == [
            text.replace("▁", " ") if "tekken" not in name else text for text in EXPECTED["texts"]
        ]


@pytest.mark.parametrize("name", NAMES)
def test_control_tokens_and_the_beginning(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, name))
    inst, bos, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("[INST]", "<s>", "</s>"))
    hello = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("[INST]hello") == [bos, inst, *hello], "a text after a control token is a text of its own"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (bos, eos) and tokenizer.bos_token_id != tokenizer.eos_token_id
    assert tokenizer.decode([bos, inst, *hello, eos], skip_special_tokens=True).strip() == "hello"


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_grammars_take_such_a_tokenizer(tmp_path: Path, name: str) -> None:
    tokenizer = load_tokenizer(make_folder(tmp_path, name))
    format = PromptFormat.from_tokenizer(tokenizer, model_digest="d", model_names=["m"], block_tokens=16, max_model_len=64)
    encoder = PromptEncoder(format)
    assert list(encoder.encode_text("a boat")) == tokenizer.encode("a boat")
    compiler = Compiler(format.tokenizer_json, len(tokenizer), [tokenizer.eos_token_id])
    assert compiler.special("[INST]") == tokenizer.convert_tokens_to_ids("[INST]")
    if name not in LOSSY:
        assert not check(compiler, Constraint("regex", "ab [0-9]{4}", "regex")).error, "text that is forced has no space before it"


def test_settings_beside_the_file(tmp_path: Path) -> None:
    added = {"content": "<|end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    size = len(load_tokenizer(make_folder(tmp_path, "bpe")))
    renamed = added | {"content": "[USER]"}
    inst = load_tokenizer(tmp_path).convert_tokens_to_ids("[INST]")
    load_tokenizer.cache_clear()
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "auto_map": {"AutoTokenizer": ["custom.Tokenizer", None]},
        "added_tokens_decoder": {str(size): added, str(inst): renamed},
        "add_bos_token": False,
        "add_eos_token": True,
        "eos_token": "<|end|>",
        "legacy": False,
    }
    make_folder(tmp_path, "bpe", settings)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}<|end|>")
    tokenizer = load_tokenizer(tmp_path)
    boat = tokenizer.encode("boat", add_special_tokens=False)
    assert tokenizer.encode("[USER] boat") == [inst, *boat, size], "with legacy off, one space after a token is the only one"
    assert tokenizer.chat_template == "{{ messages[0].content }}<|end|>" and tokenizer.eos_token_id == size
    assert isinstance(tokenizer, PreTrainedTokenizerFast)


MARKERS = ("<|im_start|>", "<|im_end|>")
FLAGS = {"special": False, "lstrip": False, "rstrip": False, "normalized": True, "single_word": False}


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("in_settings", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if "tekken" not in name])
def test_chat_markers_are_found_wherever_they_are_added(tmp_path: Path, name: str, in_settings: bool, legacy: bool) -> None:
    size = len(load_tokenizer(make_folder(tmp_path, name)))
    load_tokenizer.cache_clear()
    ids = {marker: size + at for at, marker in enumerate(MARKERS)}
    decoder = {str(number): FLAGS | {"content": marker} for marker, number in ids.items()}
    make_folder(tmp_path, name, {"legacy": legacy} | ({"added_tokens_decoder": decoder} if in_settings else {}))
    if not in_settings:
        (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
        (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    tokenizer = load_tokenizer(tmp_path)
    a, hello = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "hello"))
    encoded = tokenizer.encode("a<|im_start|>hello<|im_end|>", add_special_tokens=False)
    assert encoded[: len(a) + 1] == [*a, size] and encoded[-1] == size + 1 and (not legacy or encoded[len(a) + 1 : -1] == hello)
    assert in_settings or (tokenizer.eos_token_id == size + 1 and "<|im_end|>" not in tokenizer.decode(encoded, skip_special_tokens=True))


@pytest.mark.parametrize("name", ["symbols", "gemma"])
def test_symbols_that_the_settings_repeat_stay_as_the_file_has_them(tmp_path: Path, name: str) -> None:
    symbols = {piece: number for piece, number in load_tokenizer(make_folder(tmp_path, name)).get_vocab().items() if piece in ("\n", "▁▁")}
    load_tokenizer.cache_clear()
    decoder = {str(number): FLAGS | {"content": piece, "normalized": False} for piece, number in symbols.items()}
    tokenizer = load_tokenizer(make_folder(tmp_path, name, {"added_tokens_decoder": decoder}))
    assert [tokenizer.encode(text, add_special_tokens=False) for text in EXPECTED["texts"]] == EXPECTED["ids"][name]


@pytest.mark.parametrize(
    ("decoder", "says"),
    [
        ({"1300": {"content": "<|x|>"}}, "'<|x|>' the id 1300"),
        ({"5": {"content": "<s>"}}, "'<s>' the id 5"),
        ({"-1": {"content": "<|x|>"}}, "'<|x|>' the id -1"),
        ({"x": {"content": "<|x|>"}}, "added_tokens_decoder in tokenizer_config.json"),
        ({"420": {}}, "added_tokens_decoder in tokenizer_config.json"),
    ],
)
def test_an_added_token_has_its_id_or_is_named(tmp_path: Path, decoder: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        load_tokenizer(make_folder(tmp_path, "bpe", {"added_tokens_decoder": decoder}))


def test_added_tokens_of_one_id_are_refused_by_name(tmp_path: Path) -> None:
    size = len(load_tokenizer(make_folder(tmp_path, "bpe")))
    load_tokenizer.cache_clear()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|b|>": size, "<|c|>": size}))
    with pytest.raises(ValueError, match=re.escape(f"'<|b|>' the id {size}, and it would get {size + 1}")):
        load_tokenizer(make_folder(tmp_path, "bpe", {"added_tokens_decoder": {str(size): {"content": "<|a|>"}}}))


@pytest.mark.parametrize("name", ["bpe", "tekken"])
def test_many_added_tokens_are_added_at_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call reads all added tokens again: 8,000 calls took 23 seconds."""
    size = len(load_tokenizer(make_folder(tmp_path, name)))
    load_tokenizer.cache_clear()
    ids = {f"<|{at}|>": size + at for at in reversed(range(8000))}
    (tmp_path / "added_tokens.json").write_text(json.dumps(ids))
    add_tokens, calls = Tokenizer.add_tokens, list[int]()

    def count(tokenizer: Tokenizer, tokens: list[AddedToken]) -> int:
        calls.append(len(tokens))
        return add_tokens(tokenizer, tokens)

    monkeypatch.setattr(Tokenizer, "add_tokens", count)
    tokenizer = load_tokenizer(tmp_path)
    assert len(calls) < 5 and 8000 in calls
    assert {token: tokenizer.convert_tokens_to_ids(token) for token in ids} == ids


def test_a_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    model = make_folder(tmp_path, "bpe") / "tokenizer.model"
    whole = model.read_bytes()
    for end in (*range(50, len(whole), 199), *range(len(whole) - 100, len(whole))):
        model.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="damaged"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("token", [None, "", "no base64!", "QQ=="])
def test_a_tekken_vocabulary_without_some_tokens_is_refused(tmp_path: Path, token: str | None) -> None:
    path = make_folder(tmp_path, "tekken") / "tekken.json"
    content = json.loads(path.read_text())
    content["vocab"] = [] if token is None else [*content["vocab"][:-1], {"rank": 0, "token_bytes": token, "token_str": None}]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="not a vocabulary of Mistral's Tekken"):
        load_tokenizer(tmp_path)


def test_a_bytes_name_in_a_text_is_text(tmp_path: Path) -> None:
    """The ids are those of the sentencepiece library."""
    tokenizer = load_tokenizer(make_folder(tmp_path, "bytes"))
    assert tokenizer.encode("<<0x41>>", add_special_tokens=False) == [260, 330, 330, 329, 124, 336, 280, 339, 339]
    assert tokenizer.encode("1 <0xE6><0x9D> x", add_special_tokens=False)[2:9] == [260, 330, 329, 124, 73, 58, 339]


def test_tokenizer_json_comes_first(tmp_path: Path) -> None:
    load_tokenizer(make_folder(tmp_path, "bpe")).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    load_tokenizer.cache_clear()
    (tmp_path / "tokenizer.model").write_text("not read")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert load_tokenizer(tmp_path).encode("a boat")


CUSTOM = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer.model": "IQ== 0\nIg== 1\n"}, "not a SentencePiece model"),
        ({"tokenizer.model": ""}, "not a SentencePiece model"),
        ({"tekken.json": "{}"}, "not a vocabulary of Mistral's Tekken"),
        ({"tekken.json": "[1"}, "not a vocabulary of Mistral's Tekken"),
        ({"tokenizer.model": "x", "tokenizer_config.json": "{"}, "tokenizer_config.json is not JSON"),
        ({"tiktoken.model": "IQ== 0\n", "tokenizer_config.json": json.dumps(CUSTOM)}, "Python code of the model"),
        ({"tokenizer_config.json": '{"tokenizer_class": "LlamaTokenizer"}'}, "add the model's tokenizer.json"),
        ({"spiece.model": "x", "tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}'}, "spiece.model"),
        ({}, "add the model's tokenizer.json"),
        *(({name: LFS_POINTER}, f"{name}: only Git LFS's pointer") for name in ("tokenizer.json", "tokenizer.model", "tekken.json")),
        ({"tokenizer.json": ""}, "tokenizer.json: one of them is damaged"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: one of them is damaged"),
    ],
)
def test_an_error_says_which_file_is_missing(tmp_path: Path, files: dict[str, str], says: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        load_tokenizer(tmp_path)
    message = str(raised.value)
    assert any(advice in message for advice in ("tokenizer.json", "download it again"))
    assert not any(
        word in message for word in ("pip install", "trust_remote_code", "sentencepiece library", "mistral-common", "huggingface.co")
    )


def test_a_worker_serves_such_a_folder(tmp_path: Path) -> None:
    """Of the other kinds the tests above know the tokens, the prompts and the grammars."""
    name = "tekken"
    folder = make_model(tmp_path / "model", "llama", vocab=1024, layers=1)
    for unwanted in ("tokenizer.json", "chat_template.jinja"):
        (folder / unwanted).unlink(missing_ok=True)
    make_folder(folder, name, {"chat_template": "{{ bos_token }}[INST]{{ messages[0].content }}"}, config=False)
    worker = WorkerProcess(folder, tmp_path / "worker").wait_ready()
    try:
        text, ids = EXPECTED["texts"][0], EXPECTED["ids"][name][0]
        assert worker.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"] == ids
        body = {"prompt": text, "max_tokens": 40, "structured_outputs": {"regex": "boat [0-9]{4}"}}
        answer = worker.complete(**body)["choices"][0]
        assert re.fullmatch("boat [0-9]{4}", answer["text"].strip()) and answer["finish_reason"] == "stop"
        chat = worker.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=4)
        assert chat.status_code == 200 and chat.json()["usage"]["prompt_tokens"] == len(ids) + 2
    finally:
        worker.stop()
