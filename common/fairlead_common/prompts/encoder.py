"""Encode requests to token ids, the same in router and worker: `PromptFormat` is the configuration, `PromptEncoder` the code.

The tokens equal those of transformers' `tokenizer(text)` and `tokenizer.apply_chat_template(...)`, without torch or transformers.
"""

from array import array
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Any

import msgspec
from tokenizers import Tokenizer

from fairlead_common.errors import PromptError, PromptTooLong
from fairlead_common.prompts import messages as chat
from fairlead_common.prompts.content_parts import json_type
from fairlead_common.prompts.detokenizer import TextStream
from fairlead_common.prompts.min_tokens import MinTokenCounter
from fairlead_common.prompts.split_points import SplitPoints, find_affixes
from fairlead_common.prompts.text_template import TextTemplate
from fairlead_common.prompts.token_cache import Key, TokenCache
from fairlead_common.prompts.token_texts import TokenTexts
from fairlead_common.truncate import truncate

__all__ = ["PromptEncoder", "PromptError", "PromptFormat", "PromptTooLong"]

CACHED_FROM = 1024
"""Characters from which a text's parts are looked up in the cache. Tokenizing a shorter text costs no more than the look-up."""
SPARSE = 6
"""Characters for each allowed token from which a text is first tokenized in pieces. Prose has 4 to 5 for each token, code 3."""
PIECE = 1 << 14
"""Characters of a piece. A cut changes the tokens of some words beside it."""
REQUEST_TEMPLATES = 8
"""Templates of requests that are kept. Compiling and probing one takes 20 to 170 ms."""
BATCHED_FROM = 4096
"""Tokens from which text is decoded without the GIL: a million tokens would block other threads for 0.2 s."""


class PromptFormat(msgspec.Struct, frozen=True, kw_only=True):
    """All settings that determine token ids and block hashes of a request. Workers serve it to routers."""

    tokenizer_json: str
    """The text of `tokenizer.json`."""
    tokenizer_digest: str
    model_digest: str
    """Identifies the weights: the model's revision. Two models with equal digests share KV."""
    model_names: list[str]
    block_tokens: int
    max_model_len: int
    chat_template: str = ""
    """Empty: chat requests are refused."""
    tool_template: str = ""
    """Used instead of `chat_template` when a request has tools; empty: the same template."""
    model_uri: str = ""
    """Source of the weights, shown as `root` in `/v1/models`."""
    special_tokens: dict[str, str] = {}
    """`bos_token`, `eos_token`, ...: variables of the template."""

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, *, model_digest: str, model_names: Sequence[str], block_tokens: int, max_model_len: int, model_uri: str = ""
    ) -> "PromptFormat":
        """Create the format from a transformers fast tokenizer, whose class may have changed `tokenizer.json` (bos, prefix spaces)."""
        templates = tokenizer.chat_template or ""
        if isinstance(templates, dict):
            templates, tool_template = templates.get("default", ""), templates.get("tool_use", "")
        else:
            tool_template = ""
        text = tokenizer.backend_tokenizer.to_str()
        return cls(
            tokenizer_json=text,
            tokenizer_digest=digest(text),
            model_digest=model_digest,
            model_names=list(model_names),
            block_tokens=block_tokens,
            max_model_len=max_model_len,
            chat_template=templates,
            tool_template=tool_template,
            model_uri=model_uri,
            special_tokens=dict(tokenizer.special_tokens_map),
        )


def digest(text: str) -> str:
    """Return a 128-bit digest of a text, hexadecimal."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


class PromptEncoder:
    """Encodes and decodes in one format. Safe to use from several threads; the slow part of a long prompt runs without the GIL.

    With a cache (one for all encoders of a process) a text part is tokenized once: see `split_points`.
    """

    def __init__(self, format: PromptFormat, cache: TokenCache | None = None) -> None:
        self.format = format
        self._cache = cache
        try:
            self._tokenizer = Tokenizer.from_str(format.tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise PromptError("tokenizer_json", f"the tokenizer does not load: {error}") from error
        self._tokenizer.no_padding()  # a file may carry the settings of its training
        self._tokenizer.no_truncation()
        self._special = frozenset(id for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special)
        wanted = [format.chat_template, format.tool_template, *format.special_tokens.values()]
        self._points = SplitPoints(self._tokenizer, wanted) if cache is not None else None
        self._affixes = find_affixes(self._tokenizer) if cache is not None else None
        self._token_texts: dict[bool, dict[int, str]] = {False: {}, True: {}}
        """By `skip_special_tokens`: the texts of single tokens, at most one entry for each token of the vocabulary."""
        self._templates: dict[int, TextTemplate] = {}
        self._chat = chat.ChatRenderer(format.chat_template, format.special_tokens) if format.chat_template else None
        self._tools = chat.ChatRenderer(format.tool_template, format.special_tokens) if format.tool_template else self._chat
        self._of_request = lru_cache(REQUEST_TEMPLATES)(lambda template: chat.ChatRenderer(template, format.special_tokens))
        for renderer, with_tools in ((self._chat, False), (self._tools, True)):
            if renderer is not None:
                renderer.forms(with_tools)  # now, not within the first request

    def encode_text(self, text: str, add_special_tokens: bool = True, scope: str = "", max_tokens: int | None = None) -> "array[int]":
        """Return the token ids of a text, by default with the tokenizer's own special tokens around it (bos, ...).

        `scope` divides the cache: texts cached in one scope are neither found nor faster in another. A text that is certainly longer than
        `max_tokens` raises PromptTooLong after at most twice as many tokens; any other text is tokenized whole.
        """
        if not isinstance(text, str):
            raise PromptError("prompt", f"must be a string, not {json_type(text)}")
        try:
            if max_tokens is not None and len(text) > max_tokens:
                self._check_length(text, max_tokens)
            if self._cache is None or self._points is None or len(text) < CACHED_FROM or (add_special_tokens and self._affixes is None):
                # A batch, because `encode` holds the GIL: 20,000 tokens stop every other thread for 30 ms. "fast" leaves out the offsets.
                (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return array("I", encoding.ids)
            before, after = self._affixes if add_special_tokens and self._affixes else ([], [])
            tokens = array("I", before)
            for part in self._parts(self._cache, self._points.split(text), scope):
                tokens += part
            tokens.extend(after)
            return tokens
        except PromptTooLong:
            raise
        except Exception as error:  # lone surrogates among others; tokenizers raises bare Exception
            raise PromptError("prompt", f"cannot be tokenized: {truncate(error)}") from error

    def template(self, texts: int) -> TextTemplate:
        """Return the tokenizer's template for one text or a pair. Raises PromptError if it has none."""
        if texts not in self._templates:
            try:
                self._templates[texts] = TextTemplate.probe(self._tokenizer, texts)
            except Exception as error:  # tokenizers raises bare Exception
                raise PromptError("prompt", f"the tokenizer has no template for {texts} texts: {truncate(error)}") from error
        return self._templates[texts]

    def _check_length(self, text: str, max_tokens: int) -> None:
        """Raise PromptTooLong for a text that is certainly too long: by its letters and digits, or by its pieces.

        Only the words beside a cut differ from the whole text's, so pieces with twice the allowed tokens leave no doubt for any text.
        """
        if (min_tokens := self._min_tokens.count(text)) > max_tokens:
            raise PromptTooLong("prompt", min_tokens, max_tokens)
        if len(text) <= SPARSE * max_tokens:
            return
        count = 0
        for start in range(0, len(text), PIECE):
            (encoding,) = self._tokenizer.encode_batch_fast([text[start : start + PIECE]], add_special_tokens=False)
            count += len(encoding)
            if count > 2 * max_tokens + PIECE:
                raise PromptTooLong("prompt", count // 2, max_tokens, count)

    def _parts(self, cache: TokenCache, parts: list[str], scope: str) -> "list[array[int]]":
        """Return the token ids of a text's parts. Parts not in the cache are tokenized, each once, in one batch."""
        keys = [Key(self.format.tokenizer_digest, scope, part) for part in parts]
        found = cache.get(keys)
        new = dict.fromkeys(key for key, ids in zip(keys, found, strict=True) if ids is None)
        if not new:
            return [ids for ids in found if ids is not None]
        encodings = self._tokenizer.encode_batch_fast([key.text for key in new], add_special_tokens=False)
        made = {key: array("I", encoding.ids) for key, encoding in zip(new, encodings, strict=True)}
        for key, ids in made.items():
            cache.put(key, ids)
        return [made[key] if ids is None else ids for key, ids in zip(keys, found, strict=True)]

    def encode_chat(
        self,
        messages: Any,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        scope: str = "",
        template: str | None = None,
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
    ) -> "array[int]":
        """Return the token ids of a chat in the model's template. `messages` and `tools` are unvalidated JSON. Raises PromptError.

        `template` replaces the model's own. A template writes special tokens itself; `add_special_tokens` adds them once more.
        `scope`, `max_tokens`: as for `encode_text`.
        """
        text = self.render_chat(messages, tools, add_generation_prompt, continue_final_message, template_kwargs, template)
        try:
            return self.encode_text(text, add_special_tokens, scope, max_tokens)
        except PromptTooLong as error:
            raise PromptTooLong("messages", error.min_tokens, error.max_tokens, error.computed) from error
        except PromptError as error:
            raise PromptError("messages", error.reason) from error

    def render_chat(
        self,
        messages: Any,
        tools: Any = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """Return the text of a chat that `encode_chat` tokenizes."""
        renderer = self._tools if tools or self._needs_tool_template(messages) else self._chat
        if template is not None:
            renderer = self._of_request(template)
        if renderer is None:
            raise PromptError("messages", f"the model {self._name} has no chat template: use /v1/completions")
        return renderer.render(messages, tools, add_generation_prompt, continue_final_message, template_kwargs or {})

    def _needs_tool_template(self, messages: Any) -> bool:
        """Return whether only the template for tools renders the calls of earlier answers."""
        if self._chat is self._tools or self._chat is None or self._tools is None or self._chat.forms(False).keeps_calls:
            return False
        has_calls = isinstance(messages, list) and any(
            isinstance(each, dict) and (each.get("tool_calls") or each.get("function_call")) for each in messages
        )
        return has_calls and self._tools.forms(False).keeps_calls

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. For text that grows token by token use `stream`."""
        if len(tokens) < BATCHED_FROM:
            return self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        (text,) = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=skip_special_tokens)  # without the GIL
        return text

    def stream(self, prompt: Sequence[int] = (), skip_special_tokens: bool = True, shown: Collection[int] = ()) -> TextStream:
        """Return a stream that decodes a completion as it grows. `prompt` determines whether the first word has a leading space.

        `shown`: special tokens that are not skipped.
        """
        if not shown or not skip_special_tokens:
            return TextStream(self.decode, prompt, skip_special_tokens, self._token_texts[skip_special_tokens])
        hidden = self._special - set(shown)

        def decode(tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
            return self._tokenizer.decode([token for token in tokens if token not in hidden], skip_special_tokens=False)

        return TextStream(decode, prompt)

    def find_special_tokens(self, text: str) -> frozenset[int]:
        """Return the special tokens whose names occur in a text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(id for id in self._special if added[id].content and added[id].content in text)

    def token_text(self, token: int) -> str | None:
        """Return a token as the vocabulary writes it, or None for an id outside it."""
        return self._tokenizer.id_to_token(token)

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts and bytes of single tokens."""
        return TokenTexts(self._tokenizer)

    @property
    def spaces_special_tokens(self) -> bool:
        """Return whether decoding puts a separator between consecutive special tokens."""
        for text in self.format.special_tokens.values():
            token = self._tokenizer.token_to_id(text)
            if token is not None:
                return self.decode([token, token], skip_special_tokens=False) != 2 * text
        return False

    @property
    def vocabulary_size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def _min_tokens(self) -> MinTokenCounter:
        """The counter, created for the first long text because it scans the whole vocabulary."""
        return MinTokenCounter(self.format.tokenizer_json, self._tokenizer)

    @property
    def _name(self) -> str:
        return self.format.model_names[0] if self.format.model_names else self.format.model_digest
