"""Complete prompts whose last logits the runner keeps, so that an exact repeat samples its first token without a forward pass.

The prefix tree has only full pages. So the runner keeps the KV of a prompt's last page too, and a repeat gets a copy of it: its own tokens
follow there. The idea is that of roseinfer, whose prefix cache keeps the last logits of each prompt beside its blocks.

Bookkeeping only: the rows of a plan say what the runner keeps and reads (`scheduler.plan.Row.slot`).
"""

from collections import OrderedDict

Prompt = tuple[int, bool, bytes]
"""Root number, whether the request has a LoRA adapter, and all tokens as bytes of uint32: equal prompts, with no collisions."""


class KeptPrompts:
    """Slots 0 .. total - 1, each free or of one prompt. The least recently used prompt is dropped for another one.

    The runner first stores what a plan keeps, then reads what the plan repeats. So a slot has one prompt in each plan.
    """

    __slots__ = ("_busy", "_free", "_slots", "total")

    def __init__(self, slots: int) -> None:
        """Raise ValueError for fewer than one slot."""
        if slots < 1:
            raise ValueError(f"at least one prompt must be kept, not {slots}")
        self.total = slots
        self._free = list(range(slots - 1, -1, -1))
        self._slots: OrderedDict[Prompt, int] = OrderedDict()
        """Least recently used first."""
        self._busy: set[Prompt] = set()
        """Prompts of the plan that is being made."""

    def __len__(self) -> int:
        return len(self._slots)

    def start_plan(self) -> None:
        """Note that a plan starts."""
        self._busy.clear()

    def find(self, prompt: Prompt) -> int | None:
        """Return the slot of a kept prompt, for a row of this plan."""
        slot = self._slots.get(prompt)
        if slot is not None:
            self._use(prompt)
        return slot

    def keep(self, prompt: Prompt) -> int | None:
        """Return a slot for a prompt that this plan completes. None if this plan uses all slots, or one of its rows has the prompt."""
        if prompt in self._busy:
            return None
        slot = self._slots.get(prompt)
        if slot is None:
            if not self._free:
                oldest = next((known for known in self._slots if known not in self._busy), None)
                if oldest is None:
                    return None
                self._free.append(self._slots.pop(oldest))
            slot = self._slots[prompt] = self._free.pop()
        self._use(prompt)
        return slot

    def clear(self) -> None:
        """Drop all prompts."""
        self._free.extend(self._slots.values())
        self._slots.clear()

    def _use(self, prompt: Prompt) -> None:
        self._slots.move_to_end(prompt)
        self._busy.add(prompt)
