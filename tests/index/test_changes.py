"""Changes of a held set, without Redis: runs, their paths, and snapshots taken while the set changes."""

import random

import pytest

from fairlead_index.changes import BACKLOG_MARGIN, RUN_BLOCKS, Change, Changes
from fairlead_index.redis.scripts import script_source


class Listener:
    """Applies all changes that it receives. Every change must build on what was received before."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def hear(self, changes: list[Change]) -> None:
        for change in changes:
            path = list(change.path)
            assert 1 <= len(path) <= RUN_BLOCKS and 0 <= change.before < len(path)
            if change.kind == "S":
                self.held.update(path)
            else:
                self.held.difference_update(path[change.before :])


def follow() -> Changes:
    changes = Changes()
    changes.restart()
    return changes


def send_all(changes: Changes) -> list[tuple[str, list[int], int]]:
    return [(change.kind, list(change.path), change.before) for change in changes.take(10**6)]


def test_the_scripts_use_the_same_run_length() -> None:
    assert f"local RUN = {RUN_BLOCKS}\n" in script_source("match")


def test_a_prompt_is_sent_as_runs_and_a_longer_one_continues_at_its_end() -> None:
    changes = follow()
    changes.store(range(101, 109), parent=99)  # 99: its root
    assert changes.pending == 8
    assert send_all(changes) == [("S", [101, 102, 103, 104, 105, 106], 0), ("S", [107, 108], 0)]
    changes.store([109, 110], parent=108)
    changes.store([111], parent=110)
    assert send_all(changes) == [("S", [107, 108, 109, 110, 111], 2)]
    changes.store([101, 102, 203])  # another prompt branches off it
    assert send_all(changes) == [("S", [101, 102, 203], 2)]
    changes.remove([111, 110, 109, 108, 107, 106, 203])
    assert send_all(changes) == [("R", [107, 108, 109, 110, 111], 0), ("R", [101, 102, 103, 104, 105, 106], 5), ("R", [101, 102, 203], 2)]
    assert changes.pending == 0


def test_storing_a_held_block_or_removing_an_absent_one_changes_nothing() -> None:
    changes = follow()
    changes.store([1, 2, 3])
    send_all(changes)
    changes.store([1, 2, 3])
    changes.remove([7])
    assert not changes.pending and send_all(changes) == [] and len(changes) == 3


@pytest.mark.parametrize("seed", range(20))
def test_a_listener_of_all_changes_holds_the_same_set(seed: int) -> None:
    """Also where a new snapshot is sent while the set changes, and where only removals may be sent for a while."""
    draw = random.Random(seed)
    changes, listener = follow(), Listener()
    parents: dict[int, int] = {}
    fresh = iter(range(1, 10**6))
    for _ in range(600):
        action = draw.random()
        if action < 0.45:
            parent = draw.choice([0, *parents])
            chain = [next(fresh) for _ in range(draw.randrange(1, 15))]
            changes.store(chain, parent)
            parents.update(zip(chain, [parent, *chain], strict=False))
        elif action < 0.8:
            gone = []
            for _ in range(draw.randrange(1, 12)):
                inner = set(parents.values())
                if leaves := [block for block in parents if block not in inner]:
                    gone.append(draw.choice(leaves))
                    del parents[gone[-1]]
            changes.remove(gone)
        elif action < 0.85:
            listener = Listener()
            changes.restart()
        elif action < 0.9:
            changes.keep_removals()
            listener.hear(changes.take(10**6))
            assert listener.held <= {*parents}
            changes.restart()
        else:
            listener.hear(changes.take(draw.randrange(1, 40)))
        assert changes.pending >= 0 and len(changes) == len(parents)
    while changes.pending:
        listener.hear(changes.take(7))
    assert listener.held == {*parents} == {*changes.held}


def test_a_backlog_longer_than_the_set_is_dropped() -> None:
    changes = follow()
    for number in range(BACKLOG_MARGIN // 2 + 10):
        changes.store([number + 1])
        changes.remove([number + 1])
    assert not changes.is_following and not changes.pending


def test_a_parent_removed_before_its_child_raises_nothing() -> None:
    """The cache never does this, but a worker must keep serving if it did."""
    changes = follow()
    changes.store(range(1, 10))
    changes.remove([2, 1, 9, 3, 8])
    changes.restart()
    assert changes.take(100) and not changes.pending
