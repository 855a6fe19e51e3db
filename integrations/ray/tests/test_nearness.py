"""What requests name, and where they go, without a cluster."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from cacheblend_rag import BlendPrompt, Chunk, ChunkRef, FixedText
from cacheblend_ray.nearness import HeldNames, Nearness, name_number, names_in, pack_numbers
from cacheblend_serve.client.wire import parts_of

REPLICAS = ("a", "b", "c")
IDLE = dict.fromkeys(REPLICAS, 0)


def said(number: int, ram: tuple[str, ...] = (), disk: tuple[str, ...] = ()) -> dict[str, object]:
    return {"said": number, "ram": pack_numbers(map(name_number, ram)), "disk": pack_numbers(map(name_number, disk))}


def nearness_of(bound: int = 4, **stats: dict[str, object]) -> Nearness:
    made = Nearness(bound)
    made.learn({id: (f"machine/{id}", stats.get(id, {})) for id in REPLICAS})
    return made


def test_what_nobody_holds_belongs_to_one_replica_and_all_routers_agree() -> None:
    one, other = nearness_of(), nearness_of()
    chosen = Counter()
    for number in range(300):
        choice = one.choose([f"doc-{number}"], IDLE)
        assert choice.why == "near"
        assert len(choice.first) == 1
        assert other.choose([f"doc-{number}"], IDLE).first == choice.first
        chosen += Counter(choice.first)
    assert min(chosen.values()) > 60


def test_a_replica_that_goes_moves_only_what_was_its_own() -> None:
    nearness = nearness_of()
    names = [f"doc-{number}" for number in range(300)]
    before = {name: nearness.choose([name], IDLE).first for name in names}
    nearness.learn({id: (f"machine/{id}", {}) for id in "ab"})
    after = {name: nearness.choose([name], {"a": 0, "b": 0}).first for name in names}
    assert all(after[name] == before[name] for name in names if before[name] != ("c",))


def test_a_replica_that_starts_again_in_its_folder_has_the_same_documents() -> None:
    nearness = nearness_of()
    names = [f"doc-{number}" for number in range(100)]
    before = [nearness.choose([name], IDLE).first[0] for name in names]
    nearness.learn({"a": ("machine/a", {}), "b": ("machine/b", {}), "new": ("machine/c", {})})
    after = [nearness.choose([name], {"a": 0, "b": 0, "new": 0}).first[0] for name in names]
    assert after == ["new" if id == "c" else id for id in before]


def test_the_replica_that_holds_most_is_preferred_and_ram_over_disk() -> None:
    nearness = nearness_of(a=said(0, ram=("x",)), b=said(0, ram=("x", "y")), c=said(0, disk=("x", "y", "z")))
    assert nearness.choose(["x", "y"], IDLE).first == ("b",)
    assert nearness.choose(["x", "y"], IDLE).others[0] in ("a", "c")
    assert nearness.choose(["z"], IDLE).first == ("c",)


def test_of_those_that_hold_as_much_all_are_offered() -> None:
    nearness = nearness_of(a=said(0, ram=("x",)), b=said(0, ram=("x",)))
    # Home adds a tenth to one of them.
    assert set(nearness.choose(["x"], IDLE).first) <= {"a", "b", "c"} - {"c"}


def test_what_was_sent_counts_until_a_report_after_it_does_not_name_it() -> None:
    nearness = nearness_of()
    home = nearness.choose(["x"], IDLE).first[0]
    other = next(id for id in REPLICAS if id != home)
    nearness.note_sent(other, ["x"])
    assert nearness.choose(["x"], IDLE).first == (other,)
    stats = {id: (f"machine/{id}", {}) for id in REPLICAS}
    nearness.learn(stats | {other: (f"machine/{other}", said(1))})
    assert nearness.choose(["x"], IDLE).first == (other,), "the request may have been on its way"
    nearness.learn(stats | {other: (f"machine/{other}", said(2))})
    assert nearness.choose(["x"], IDLE).first == (home,)


def test_load_wins_over_what_is_held_where_the_queue_is_longer_by_more_than_the_bound() -> None:
    nearness = nearness_of(bound=2, a=said(0, ram=("x",)))
    assert nearness.choose(["x"], {"a": 2, "b": 0, "c": 0}).why == "near"
    choice = nearness.choose(["x"], {"a": 3, "b": 0, "c": 0})
    assert choice.why == "load"
    assert set(choice.first) == {"b", "c"}
    assert nearness.choose(["x"], {"a": 9, "b": 8, "c": 7}).why == "near"


def test_what_names_nothing_goes_to_two_at_random() -> None:
    choices = [nearness_of().choose([], IDLE) for _ in range(50)]
    assert {choice.why for choice in choices} == {"any"}
    assert {len(choice.first) for choice in choices} == {2}
    assert len({id for choice in choices for id in choice.first}) == 3


def test_one_replica_is_enough() -> None:
    nearness = Nearness(4)
    nearness.learn({"a": ("machine/0", {})})
    assert nearness.choose(["x"], {"a": 50}).first == ("a",)
    assert nearness.choose([], {"a": 50}).first == ("a",)


@pytest.mark.parametrize("stats", [{}, {"said": 1}, {"said": 1, "ram": b"123"}, {"said": "1", "ram": None}])
def test_a_replica_that_says_nothing_of_use_holds_nothing(stats: dict[str, object]) -> None:
    assert nearness_of(a=stats).choose(["x"], IDLE).why == "near"


class Library:
    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def places(self, ids: Sequence[str]) -> list[str | None]:
        return [f"{self.namespace}{id.partition('#')[0]}" for id in ids]


OURS, THEIRS = Library(""), Library("their ")


def numbers(*names: str) -> set[int]:
    return set(map(name_number, names))


def told(held: HeldNames) -> tuple[set[int], set[int]]:
    from array import array

    said = held.told()
    ram, disk = said["ram"], said["disk"]
    assert isinstance(ram, bytes) and isinstance(disk, bytes)
    return set(array("Q", ram)), set(array("Q", disk))


def test_a_replica_tells_chunks_and_their_documents_as_far_as_ram_reaches() -> None:
    held = HeldNames(30, 20)
    held.note(OURS, [("x#1", 10), ("x#2", 10)])
    held.note(OURS, [("y#1", 10)])
    assert told(held) == (numbers("x#1", "x#2", "y#1", "x", "y"), set())
    held.note(OURS, [("x#2", 10), ("z#1", 10)])
    assert told(held) == (numbers("x#2", "y#1", "z#1", "x", "y", "z"), numbers("x#1", "x"))
    held.note(OURS, [("w#1", 30)])
    assert told(held)[0] == numbers("w#1", "w")
    assert told(held)[1] == numbers("x#2", "z#1", "x", "z")


def test_a_tenants_chunk_is_of_its_own_document() -> None:
    held = HeldNames(30, 20)
    held.note(OURS, [("x#1", 10)])
    held.note(THEIRS, [("x#1", 10)])
    assert told(held) == (numbers("x#1", "x", "their x"), set())
    held.note(THEIRS, [("y#1", 10), ("z#1", 10)])
    assert told(held) == (numbers("x#1", "y#1", "z#1", "their x", "their y", "their z"), numbers("x#1", "x"))


def test_what_is_told_is_numbered() -> None:
    held = HeldNames(10, 0)
    assert [held.told()["said"], held.told()["said"]] == [1, 2]


CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "names"),
    [
        (CHAT, {"messages": [], "documents": ["a", {"id": "b"}, {"text": "c"}, "a"]}, ("a", "b")),
        ("/v1/completions", {"prompt": "x", "documents": ["a"]}, ("a",)),
        ("/v1/completions", {"prompt": [1, 2]}, ()),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "document", "id": "a"}, {"type": "text", "id": "b"}]}]},
            ("a",),
        ),
        ("/v1/chunks", {"chunks": [{"id": "a", "text": "x", "document": "d"}, {"id": "b", "text": "y"}]}, ("d", "b")),
        ("/v1/prefetch", {"ids": ["a", "b"]}, ("a", "b")),
        ("/v1/models", {"documents": ["a"]}, ()),
        (CHAT, {"documents": {"id": "a"}, "messages": "x"}, ()),
        (CHAT, {"documents": [1, None, ["a"], {"id": 3}], "messages": [None, {"content": 3}]}, ()),
        (CHAT, ["a"], ()),
    ],
)
def test_the_documents_and_chunks_of_a_request(path: str, body: Any, names: tuple[str, ...]) -> None:
    assert names_in("POST", path, json.dumps(body).encode()) == names


def test_an_engine_of_frameworks_names_its_chunks() -> None:
    prompt = BlendPrompt(segments=["q", FixedText("f"), Chunk("text", "a"), Chunk("nameless"), ChunkRef("b")])
    body = json.dumps({"prompt": parts_of(prompt)}).encode()
    assert names_in("POST", "/v1/completions", body) == ("a", "b")


def test_a_document_is_named_by_its_address() -> None:
    assert names_in("PUT", "/v1/documents/guide/one.md", b"{}") == ("guide/one.md",)
    assert names_in("DELETE", "/v1/documents/guide/one.md", b"") == ("guide/one.md",)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"3"])
def test_what_cannot_be_read_names_nothing(body: bytes) -> None:
    assert names_in("POST", CHAT, body) == ()


def test_a_request_says_enough_with_so_many_names() -> None:
    body = json.dumps({"ids": [str(number) for number in range(1000)]}).encode()
    assert len(names_in("POST", "/v1/prefetch", body)) == 256
