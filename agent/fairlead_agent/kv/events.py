"""The wire format of KV events, as vLLM and SGLang publish them: a msgpack batch of BlockStored, BlockRemoved and AllBlocksCleared.

Both encodings of msgspec structs occur: arrays, where fields have positions, and maps. Versions of vLLM differ in it, and newer ones append
fields. Unknown events and fields are ignored.
"""

from typing import Any, Final

import msgspec

EngineHash = bytes | int
"""A block's name in the engine: a digest or 64 bits of it, by version."""


class Stored(msgspec.Struct, frozen=True):
    """A chain of blocks that the engine stored. `parent`: the block before the first; None: the chain starts a prompt."""

    hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: list[int]
    """Tokens of all blocks; empty if the blocks were only copied to another medium."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    """What the blocks' names cover besides tokens, for each block: LoRA name, images, salt (first block only)."""
    group: int | None = None
    kind: str | None = None
    """Attention of the layers whose KV this is, such as `full_attention` or `sliding_window`; None: the engine does not tell."""
    salt: str | None = None
    """Salt of the prompt, where it is not among `extra_keys`: SGLang's."""


class Removed(msgspec.Struct, frozen=True):
    """Blocks that the engine evicted."""

    hashes: list[EngineHash]
    medium: str | None = None
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True):
    """The engine dropped its whole cache."""


Event = Stored | Removed | Cleared
_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx")


def decode_batch(payload: bytes) -> list[Event]:
    """Return the events of a batch, in order. Raises ValueError for bytes that are not a batch."""
    try:
        batch = msgspec.msgpack.decode(payload)
        events = batch["events"] if isinstance(batch, dict) else batch[1]
        return [event for item in events if (event := _event(item)) is not None]
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from error


def _event(item: Any) -> Event | None:
    tag, values = (item["type"], item) if isinstance(item, dict) else (item[0], item[1:])
    if tag == "BlockStored":
        fields = _fields(values, _STORED)
        return msgspec.convert(
            {
                "hashes": fields["block_hashes"],
                "parent": fields.get("parent_block_hash"),
                "tokens": fields.get("token_ids") or [],
                "block_size": fields.get("block_size") or 0,
                "lora_id": fields.get("lora_id"),
                "medium": fields.get("medium"),
                "lora_name": fields.get("lora_name"),
                "extra_keys": fields.get("extra_keys"),
                "group": fields.get("group_idx"),
                "kind": fields.get("kv_cache_spec_kind"),
                "salt": fields.get("cache_salt"),
            },
            Stored,
        )
    if tag == "BlockRemoved":
        fields = _fields(values, _REMOVED)
        return msgspec.convert(
            {"hashes": fields["block_hashes"], "medium": fields.get("medium"), "group": fields.get("group_idx")}, Removed
        )
    return Cleared() if tag == "AllBlocksCleared" else None


def _fields(values: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return values if isinstance(values, dict) else dict(zip(names, values, strict=False))
