"""What goes first from host memory."""

from __future__ import annotations

import torch

from onestem.cache.host import HostStore

PART = torch.zeros(20, dtype=torch.uint8)


def there(store, names):
    return "".join(name for name in names if name in store)


def test_what_left_kv_memory_longest_ago_goes_first():
    """Not what was used longest ago: what is copied back is in KV memory."""
    store = HostStore(60)
    for name in "abc":
        assert store.put(name, PART)
    assert store.get("a") is PART
    store.put("d", PART)
    assert there(store, "abcd") == "bcd"
    assert store.touch("b")
    assert not store.touch("a")
    store.put("e", PART)
    assert there(store, "abcde") == "bde"
    assert not store.put("f", torch.zeros(61, dtype=torch.uint8))
    assert store.put("b", PART)
    assert (store.num_bytes, len(store)) == (60, 3)


def test_room_is_made_before_rows_are_taken():
    store = HostStore(60)
    for name in "ab":
        store.put(name, PART)
    store.put("c", PART, is_awaited=True)
    store.make_room(20)
    assert there(store, "abc") == "bc"
    store.make_room(20)
    assert there(store, "abc") == "bc"
    store.make_room(61)  # what is awaited stays
    assert (there(store, "abc"), store.num_bytes) == ("c", 20)


def test_what_is_awaited_goes_last():
    """Until it is used, and as far as three quarters of the budget go."""
    store = HostStore(100)
    for name in "ab":
        store.put(name, PART, is_awaited=True)
    for name in "cdefg":
        store.put(name, PART)
    assert there(store, "abcdefg") == "abefg"
    store.get("a")
    for name in "hij":  # four are more: the oldest counts as others
        store.put(name, PART, is_awaited=True)
    assert there(store, "abefghij") == "abhij"
    for name in "kl":
        store.put(name, PART)
    assert there(store, "abhijkl") == "hijkl"
    store.discard("h")
    assert (store.num_bytes, len(store)) == (80, 4)


def test_what_is_there_already_may_be_awaited():
    store = HostStore(60)
    for name in "abc":
        store.put(name, PART)
    store.expect("a")
    store.expect("z")
    for name in "de":
        store.put(name, PART)
    assert there(store, "abcde") == "ade"
    assert store.num_bytes == 60


def test_what_comes_once_goes_before_a_conversation():
    """Turns come back after two others of their own; of the prompts between them none does."""
    store = HostStore(200)
    found = []
    for i in range(100):
        turn = f"talk {i % 3}"
        found.append(store.get(turn) is not None)
        if not store.touch(turn, 1):
            store.put(turn, PART, 1)
        for j in range(4):
            store.put(f"once {i} {j}", PART, 0)
    assert all(found[30:])
    assert sum(name in store for name in ("talk 0", "talk 1", "talk 2")) == 3


def test_a_conversation_that_ended_goes():
    """When others come back, and it does not."""
    store = HostStore(200)
    for i in range(40):
        for j in range(3):
            if not store.touch(f"talk {j}", 1):
                store.put(f"talk {j}", PART, 1)
            store.get(f"talk {j}")
        store.put(f"once {i}", PART, 0)
    for i in range(200):
        store.put(f"then {i}", PART, 0)
        store.get(f"then {i - 5}")
    assert not any(f"talk {j}" in store for j in range(3))
