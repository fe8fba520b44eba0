"""Tokenizers of folders without `tokenizer.json`: SentencePiece's `tokenizer.model`, and Mistral's `tekken.json`.

transformers reads both only beside packages that the images do not have. The parts are those of its own readers: the message of
SentencePiece's file, and the converter of Tekken's. Both give the token ids of the libraries that wrote the files.
"""

import base64
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import import_protobuf
from transformers.integrations.mistral.tokenizer import MistralConverter

from fairlead_worker.weights.gguf.tokenizer import BYTE, CONTROL, SPACE, UNKNOWN, USER_DEFINED, score_merges

SENTENCEPIECE, TEKKEN = "tokenizer.model", "tekken.json"
_UNIGRAM, _BPE = 1, 2
_SETTINGS = "tokenizer_config.json"
_ADDED, _SPECIAL = "added_tokens.json", "special_tokens_map.json"
_BESIDE = ("chat_template.jinja", "chat_template.json")
_TURNS = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]")
_MORE = ("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]")
_FIRST_TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", *_TURNS, *_MORE)
"""Control tokens of Tekken files that do not name theirs (Mistral NeMo)."""


class TokenizerFileError(ValueError):
    """A tokenizer's file cannot be used. The message has the reason and what to do."""


def convert_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """Return the tokenizer of a folder that has one of these files and no `tokenizer.json`, or None. Raise TokenizerFileError."""
    found = next((name for name in (TEKKEN, SENTENCEPIECE) if (folder / name).is_file()), None)
    if found is None or (folder / "tokenizer.json").is_file():
        return None
    try:
        settings = json.loads((folder / _SETTINGS).read_text()) if (folder / _SETTINGS).is_file() else {}
    except ValueError as error:
        raise TokenizerFileError(f"{_SETTINGS} is not JSON: {error}; download it again") from error
    added = _read_added_tokens(folder, settings)
    tokenizer, tokens = _read_tekken(folder / TEKKEN) if found == TEKKEN else _read_sentencepiece(folder / SENTENCEPIECE, added, settings)
    symbols = {number: token for number, token in tokenizer.get_added_tokens_decoder().items() if token.normalized}
    for at, (number, token) in enumerate(added):
        if (symbol := symbols.get(number)) is not None and symbol.content == token.content:
            symbol.special = token.special
            added[at] = number, symbol
    size = tokenizer.get_vocab_size()
    tokenizer.add_tokens([token for _, token in added])  # at once: each call reads all added tokens again
    for number, token in added:
        if (got := tokenizer.token_to_id(token.content)) != number:
            raise TokenizerFileError(
                f"{_SETTINGS} or {_ADDED} gives {token.content!r} the id {number}, and it would get {got}: "
                f"added tokens must follow the {size} of {found} without a gap, and keep their ids; add the model's tokenizer.json"
            )
    tokenizer.post_processor = _add_ends(tokenizer, tokens | settings, settings)
    # The tokenizer has the added tokens already. With them in its settings, transformers would ignore the special tokens' file.
    unused = ("auto_map", "tokenizer_file", "add_bos_token", "add_eos_token", "added_tokens_decoder")
    given = {key: value for key, value in settings.items() if key not in unused}
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save(f"{made}/tokenizer.json")
        described = tokens | given | {"tokenizer_class": "PreTrainedTokenizerFast"}
        (Path(made) / _SETTINGS).write_text(json.dumps(described))
        for name in _BESIDE if "added_tokens_decoder" in settings else (*_BESIDE, _SPECIAL):
            if (folder / name).is_file():
                shutil.copy(folder / name, made)
        return PreTrainedTokenizerFast.from_pretrained(made, local_files_only=True)


def _read_added_tokens(folder: Path, settings: Mapping[str, Any]) -> list[tuple[int, AddedToken]]:
    """Return (id, token) of each token that the settings or `added_tokens.json` add to those of the tokenizer's file, sorted by id."""
    name = f"added_tokens_decoder in {_SETTINGS}"
    try:
        found: dict[str, tuple[int, dict[str, Any]]] = {}
        for number, token in (settings.get("added_tokens_decoder") or {}).items():
            flags = dict(token) if isinstance(token, dict) else {"content": str(token)}
            found[flags.pop("content")] = int(number), flags
        name = f"{_ADDED} or {_SPECIAL}"
        legacy, special = (json.loads((folder / each).read_text()) if (folder / each).is_file() else {} for each in (_ADDED, _SPECIAL))
        named = [each for value in {**settings, **special}.values() for each in (value if isinstance(value, list) else [value])]
        names = {each.get("content") if isinstance(each, dict) else str(each) for each in named}
        for token, number in legacy.items():
            found.setdefault(token, (int(number), {"special": token in names}))
        # Slow tokenizers find them in the text as it is. The normalizer's leading space would hide them.
        added = [(number, AddedToken(token, **(flags | {"normalized": False}))) for token, (number, flags) in found.items()]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TokenizerFileError(f"{name} is no list of tokens with their ids ({error!r:.100}): download it again") from error
    return sorted(added, key=lambda one: one[0])


def _read_tekken(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return (tokenizer, its special tokens)."""
    try:
        content = json.loads(path.read_text())
        tokens = {base64.b64decode(each["token_bytes"], validate=True) for each in content["vocab"]}
        if len(tokens) < len(content["vocab"]) or b"" in tokens or any(bytes([byte]) not in tokens for byte in range(256)):
            raise ValueError("a token is empty or comes twice, or a byte has none")
        if content.get("special_tokens") is None:
            named = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(_FIRST_TEKKEN)]
            with tempfile.TemporaryDirectory() as made:
                (Path(made) / TEKKEN).write_text(json.dumps(content | {"special_tokens": named}))
                tokenizer = MistralConverter(f"{made}/{TEKKEN}").converted()
        else:
            tokenizer = MistralConverter(str(path)).converted()
    except Exception as error:  # KeyError and TypeError for a file of another form
        raise TokenizerFileError(
            f"{TEKKEN} is not a vocabulary of Mistral's Tekken ({error!r:.100}): download it again, or add a tokenizer.json"
        ) from error
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tokenizer, {name: token for name, token in names.items() if tokenizer.token_to_id(token) is not None}


def _read_sentencepiece(
    path: Path, added: Sequence[tuple[int, AddedToken]], settings: Mapping[str, Any]
) -> tuple[Tokenizer, dict[str, Any]]:
    """Return (tokenizer, its special tokens)."""
    proto = import_protobuf().ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
        is_whole = proto.HasField("trainer_spec") and proto.HasField("normalizer_spec")  # these follow the pieces
    except DecodeError:
        is_whole = False
    if not proto.pieces:
        raise TokenizerFileError(
            f"{SENTENCEPIECE} is not a SentencePiece model; other vocabularies (tiktoken) do not say how text is split: "
            "add the tokenizer.json of the model, or of another one with the same tokenizer"
        )
    if not is_whole:
        raise TokenizerFileError(f"{SENTENCEPIECE} is damaged: it ends after {len(proto.pieces)} pieces; download it again")
    trainer, rules = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type not in (_UNIGRAM, _BPE) or trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise TokenizerFileError(
            f"{SENTENCEPIECE} is a SentencePiece model of a kind that is not supported (BPE and unigram are): add a tokenizer.json"
        )
    pieces = [piece.piece for piece in proto.pieces]
    known = set(pieces)
    for number, token in added:  # they rename placeholders
        if 0 <= number < len(pieces) and token.content not in known:
            known.discard(pieces[number])
            known.add(token.content)
            pieces[number] = token.content
    tokenizer = Tokenizer(_model(proto, pieces))
    kinds = [piece.type for piece in proto.pieces]
    symbols = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == USER_DEFINED]
    _set_text_rules(tokenizer, rules, symbols, settings.get("legacy") is False)
    if trainer.model_type == _UNIGRAM and trainer.byte_fallback:  # "<0x41>" in a text is no byte, but the library finds all pieces in it
        split = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each for each in (tokenizer.pre_tokenizer, split) if each is not None])
    # Symbols that the user defined are found in the normalized text, after the leading space was added.
    control = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_tokens([AddedToken(piece, normalized=True, special=False) for piece in symbols])
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in control])
    ids = {"bos": trainer.bos_id, "eos": trainer.eos_id, "unk": trainer.unk_id, "pad": trainer.pad_id}
    return tokenizer, {f"{name}_token": pieces[number] for name, number in ids.items() if 0 <= number < len(pieces)}


def _model(proto: Any, pieces: list[str]) -> BPE | Unigram:
    unknown, bytes_fall_back = proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback
    if proto.trainer_spec.model_type == _UNIGRAM:
        scored = [(piece, each.score) for piece, each in zip(pieces, proto.pieces, strict=True)]
        return Unigram(scored, unk_id=unknown, byte_fallback=bytes_fall_back)
    vocab = {piece: number for number, piece in enumerate(pieces)}
    unmerged = {number for number, piece in enumerate(proto.pieces) if piece.type in (UNKNOWN, CONTROL, USER_DEFINED, BYTE)}
    merges = score_merges(vocab, [piece.score for piece in proto.pieces], unmerged)
    return BPE(vocab=vocab, merges=merges, unk_token=pieces[unknown], fuse_unk=True, byte_fallback=bytes_fall_back)


def _set_text_rules(tokenizer: Tokenizer, rules: Any, symbols: Sequence[str], is_first_only: bool) -> None:
    """Set how text becomes pieces and back.

    `is_first_only`: the space before a text is added once, and only if there is none, as transformers does with `legacy: false`. Otherwise
    it is added after each control token, as by a program that encodes the texts between them one by one.
    """
    parts: list[Any] = [normalizers.Precompiled(rules.precompiled_charsmap)] if rules.precompiled_charsmap else []
    if rules.remove_extra_whitespaces:
        parts += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if rules.add_dummy_prefix and is_first_only:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    elif rules.add_dummy_prefix:
        # The library normalizes the symbols too, which must stay as they are.
        unchanged = "".join(rf"(?!{re.escape(symbol)}\z)" for symbol in symbols)
        parts.append(normalizers.Replace(Regex(rf"\A{unchanged}(?=[\s\S])"), SPACE) if symbols else normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*parts, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if rules.add_dummy_prefix else back)


def _add_ends(tokenizer: Tokenizer, tokens: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Return what puts BOS before a text, and EOS after it if the settings say so."""
    template, ids = ["$A"], {}
    for name, wanted in (("bos", settings.get("add_bos_token", True)), ("eos", settings.get("add_eos_token", False))):
        token = tokens.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if wanted and token and (number := tokenizer.token_to_id(token)) is not None:
            ids[token] = number
            template.insert(0 if name == "bos" else len(template), token)
    return processors.TemplateProcessing(single=template, pair=[*template, "$B"], special_tokens=list(ids.items())) if ids else None
