"""Content blocks of Anthropic's messages, as messages of a chat.

Blocks that templates have no place for are text or left out, and noted: a client sends its whole history with each request, so one block
that is refused ends the conversation.
"""

from collections.abc import Iterator
from typing import Any

from fairlead_common.prompts.plain_text import MEDIA, is_media, write_arguments, write_json
from fairlead_common.protocols.chat_builder import ChatBuilder, join_texts
from fairlead_common.protocols.conversion import Omissions
from fairlead_common.protocols.fields import check_text, iterate_objects, refuse, require_text
from fairlead_common.truncate import quote

_LEFT_OUT = ("redacted_thinking", "container_upload", "fallback", "mcp_tool_listing", "tool_addition", "tool_removal")
"""Blocks that only their issuer can read, or that name things of its service."""
_BILLING = "x-anthropic-billing-header:"
"""Claude Code begins the system prompt with a line of this form, which is for Anthropic. It differs between requests, so that no prefix
would be cached."""


class BlockReader:
    """Adds the content of messages to a chat."""

    def __init__(self, chat: ChatBuilder, omissions: Omissions) -> None:
        self._chat = chat
        self._omissions = omissions

    def add_system(self, content: Any, where: str) -> None:
        texts = (text.partition("\n")[2].lstrip() if text.startswith(_BILLING) else text for text in self._texts(content, where))
        if shown := list(filter(None, texts)):
            self._chat.add_message("system", join_texts(shown))

    def add_user(self, content: Any, where: str, is_last: bool) -> None:
        """Add tool results as messages of their own, before the user's text.

        `is_last`: it is the last message of the user. A picture in it is refused, because an answer without it would be wrong. One beside
        tool results comes from a tool.
        """
        if isinstance(content, str):
            self._chat.add_message("user", content)
            return
        blocks, texts = list(iterate_objects(content, where)), []
        needs_media = is_last and not any(block.get("type") == "tool_result" for _, block in blocks)
        for at, block in blocks:
            if block.get("type") == "tool_result":
                self._chat.add_tool_result(require_text(block, "tool_use_id", at), self._result(block, at))
            else:
                texts += self._block_texts(block, at, needs_media)
        if texts:
            self._chat.add_message("user", join_texts(texts))
        elif not content:
            refuse(where, "is empty: give a text, or at least one block")

    def add_assistant(self, content: Any, where: str) -> None:
        if isinstance(content, str):
            self._chat.add_answer(content)
            return
        texts = []
        for at, block in iterate_objects([] if content is None else content, where):
            match block.get("type"):
                case "thinking":
                    self._chat.add_reasoning(check_text(block.get("thinking") or "", f"{at}.thinking"))
                case "tool_use":
                    name, arguments = require_text(block, "name", at), write_arguments(block.get("input"))
                    self._chat.add_tool_call(require_text(block, "id", at), name, arguments)
                case _:
                    texts += self._block_texts(block, at)
        if texts:
            self._chat.add_answer(join_texts(texts))

    def _result(self, block: dict[str, Any], where: str) -> Any:
        """Return a tool result. Templates have no field for is_error, so the text states it."""
        texts = self._texts(block.get("content") or "", f"{where}.content") or [""]
        if block.get("is_error") is not True:
            return join_texts(texts)
        return f"Error: {texts[0]}" if len(texts) == 1 else join_texts(["Error:", *texts])

    def _texts(self, content: Any, where: str, needs_media: bool = False, in_document: bool = False) -> list[str]:
        if isinstance(content, str):
            return [content]
        return [text for at, block in iterate_objects(content, where) for text in self._block_texts(block, at, needs_media, in_document)]

    def _block_texts(self, block: dict[str, Any], where: str, needs_media: bool = False, in_document: bool = False) -> list[str]:
        """Return what a model can read of a block that is neither a call nor a result. `needs_media`: refuse a picture or a file.

        `in_document`: a document in another one is passed as JSON, so that their depth is bounded.
        """
        kind = block.get("type")
        match kind:
            case "text":
                return [require_text(block, "text", where)]
            case "tool_reference":
                return [require_text(block, "tool_name", where)]
            case "compaction":
                return list(filter(None, [check_text(block.get("content") or "", f"{where}.content")]))
            case "search_result" | "document" if not is_media(block) and not in_document:
                return ["\n".join(self._document(block, where, needs_media))]
            case str() if kind in _LEFT_OUT:
                self._omissions.leave_out(where, kind)
                return []
            case str() if kind != "image" and not is_media(block):
                self._omissions.pass_as_text(where, kind)
                return [write_json(block)]
            case str() if not needs_media:
                self._omissions.leave_out(where, kind)
                return [MEDIA.format(kind=kind)]
        return refuse(f"{where}.type", f"is {quote(kind)}: this model reads text only")

    def _document(self, block: dict[str, Any], where: str, needs_media: bool) -> Iterator[str]:
        """Yield the heading and the text of a document or a search result."""
        source = block.get("source")
        for heading in (block.get("title"), source, block.get("context")):
            if isinstance(heading, str):
                yield heading
        if not isinstance(source, dict):
            yield from self._texts(block.get("content") or [], f"{where}.content", needs_media, True)
        elif source.get("type") == "text":
            yield require_text(source, "data", f"{where}.source")
        else:
            yield from self._texts(source.get("content") or [], f"{where}.source.content", needs_media, True)
