"""Names in a request, and the replica that has most of them, by what the replicas say they hold and what they were sent since."""

from __future__ import annotations

import json
import random
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, Protocol

from cacheblend_rag.errors import CacheBlendError

__all__ = ["ANSWERING", "Call", "Choice", "HeldNames", "Nearness", "name_number", "names_in", "pack_numbers"]

# A name that no replica holds goes to the one that it belongs to, if that is all there is to say.
_IN_RAM, _ON_DISK, _AT_HOME = 1.0, 0.5, 0.1
# Names that were sent to a replica and that it has not spoken of yet.
_MOST_SENT = 16_384
# Of what a replica tells, the names of latest use.
_MOST_TOLD = 16_384
ANSWERING = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths at which answers are asked for, which have a time limit."""
_DOCUMENTS = "/v1/documents/"
# What has names in its body.
_NAMING = ANSWERING | {"/v1/chunks", "/v1/chunks/delete", "/v1/prefetch"}
# More than these say no more of where a request should go.
_MOST_NAMES = 256
# A chunk's namespace, which is a tenant's own, and its id.
Name = tuple[str, str]


@dataclass
class Call:
    """An HTTP request, read whole.

    Attributes
    ----------
    method, path, query, headers, body, client
        The request, as ASGI has it.
    names : tuple of str
        The documents and chunks that it names.
    why : str
        Why it went where it goes, once it is routed: "near" what it names, by "load" instead, or "any".
    near : tuple of str
        The replicas that it was to go to first.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None
    names: tuple[str, ...] = ()
    why: str = "any"
    near: tuple[str, ...] = ()


def names_in(method: str, path: str, body: bytes) -> tuple[str, ...]:
    """Return the documents and chunks that a request names, each once; none where it cannot be read, which a replica will say."""
    if path.startswith(_DOCUMENTS):
        return (path.removeprefix(_DOCUMENTS),)
    if method != "POST" or path not in _NAMING:
        return ()
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return ()
    names: dict[str, None] = {}
    for name in _named(said):
        if isinstance(name, str) and name:
            names[name] = None
            if len(names) == _MOST_NAMES:
                break
    return tuple(names)


def _named(said: Any) -> Iterator[Any]:
    if not isinstance(said, dict):
        return
    yield from _items(said.get("ids"))
    for document in _items(said.get("documents")):
        yield document.get("id") if isinstance(document, dict) else document
    for chunk in _dicts(said.get("chunks")):
        yield chunk.get("document") or chunk.get("id")
    contents = [said.get("prompt"), *(message.get("content") for message in _dicts(said.get("messages")))]
    for part in chain.from_iterable(map(_dicts, contents)):
        yield part.get("id") if part.get("type") == "document" else None


def _items(given: Any) -> list[Any]:
    return given if isinstance(given, list) else []


def _dicts(given: Any) -> Iterator[dict[str, Any]]:
    return (item for item in _items(given) if isinstance(item, dict))


def name_number(name: str) -> int:
    """Return the number, of 64 bits, that stands for a name where replicas say what they hold."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Return numbers of names as what replicas send."""
    return array("Q", numbers).tobytes()


@dataclass(frozen=True, slots=True)
class Choice:
    """Replicas that a request may go to.

    Attributes
    ----------
    why : "near", "load" or "any"
        The replicas hold most of what it names; they would be these, but are too busy; it names nothing.
    first, others : tuple of str
        Who is asked first, the least busy of them, and who else may be.
    """

    why: Literal["near", "load", "any"]
    first: tuple[str, ...]
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class _Held:
    """State of a replica as far as known; `said` is the number of its last report."""

    home: str
    said: int = -1
    ram: frozenset[int] = frozenset()
    disk: frozenset[int] = frozenset()
    # By the number of the report that they were sent after.
    sent: OrderedDict[int, int] = field(default_factory=OrderedDict)

    def score(self, number: int) -> float:
        if number in self.ram or number in self.sent:
            return _IN_RAM
        return _ON_DISK if number in self.disk else 0.0


class Nearness:
    """Chooses replicas by what they hold, and by load where those are too busy.

    Parameters
    ----------
    queue_bound : int
        By how many requests a replica's queue may be longer than the shortest before load decides.
    """

    def __init__(self, queue_bound: int) -> None:
        self._queue_bound = queue_bound
        self._held: dict[str, _Held] = {}

    def learn(self, replicas: Mapping[str, tuple[str, Mapping[str, object]]]) -> None:
        """Take note of the replicas: by id, what each is called from start to start, and what it said last."""
        self._held = {id: self._held.get(id) or _Held(home) for id, (home, _) in replicas.items()}
        for id, (home, stats) in replicas.items():
            held, said = self._held[id], stats.get("said")
            held.home = home
            if isinstance(said, int) and said != held.said:
                # What was sent just before a report may have come too late for it, and stays until the next.
                for number in [number for number, after in held.sent.items() if after != held.said]:
                    del held.sent[number]
                held.ram, held.disk = _numbers(stats.get("ram")), _numbers(stats.get("disk"))
                held.said = said

    def note_sent(self, replica: str, names: Sequence[str]) -> None:
        """Take note of a request that went to a replica, which will hold what it names from then on."""
        held = self._held.get(replica)
        if held is None:
            return
        for name in names:
            number = name_number(name)
            held.sent[number] = held.said
            held.sent.move_to_end(number)
        while len(held.sent) > _MOST_SENT:
            held.sent.popitem(last=False)

    def choose(self, names: Sequence[str], queues: Mapping[str, int]) -> Choice:
        """Return where a request goes.

        Parameters
        ----------
        names : sequence of str
            What it names: documents, or chunks.
        queues : mapping of (str, int)
            The replicas, and how many requests each has, as far as is known.
        """
        if not names:
            return Choice("any", _two_of(list(queues)), tuple(queues))
        scores = self._scores(names, queues)
        best = max(scores.values())
        near = [id for id, score in scores.items() if score == best]
        free = min(near, key=lambda id: queues[id])
        if queues[free] > min(queues.values()) + self._queue_bound:
            return Choice("load", _two_of([id for id in queues if id not in near]), tuple(queues))
        ranked = sorted((id for id in queues if id not in near), key=lambda id: -scores[id])
        return Choice("near", tuple(near), tuple(ranked))

    def _scores(self, names: Sequence[str], replicas: Iterable[str]) -> dict[str, float]:
        scores = dict.fromkeys(replicas, 0.0)
        homes = {id: held.home if (held := self._held.get(id)) else id for id in scores}
        for name in names:
            number = name_number(name)
            for id in scores:
                held = self._held.get(id)
                scores[id] += held.score(number) if held else 0.0
            # Rendezvous hashing: all routers agree, and a replica that comes or goes moves only what is its own.
            scores[max(homes, key=lambda id: name_number(f"{homes[id]}\0{name}"))] += _AT_HOME
        return {id: round(score, 6) for id, score in scores.items()}


def _numbers(packed: object) -> frozenset[int]:
    return frozenset(array("Q", packed)) if isinstance(packed, bytes) and len(packed) % 8 == 0 else frozenset()


def _two_of(replicas: list[str]) -> tuple[str, ...]:
    return tuple(random.sample(replicas, min(2, len(replicas))))


class Placing(Protocol):
    """Chunks of one tenant, and their documents."""

    namespace: str

    def places(self, ids: Sequence[str], /) -> Sequence[str | None]:
        """Return the documents of chunks."""


class HeldNames:
    """The chunks that were used last, by ids, with the document of each: what RAM has room for, and what the disk has.

    The same id of two tenants is two chunks. It mirrors the store's own LRU, as far as answers tell its order and sizes. Where it
    is wrong, a request goes to a replica that reads from farther away than was thought.

    Parameters
    ----------
    ram_bytes, disk_bytes : int
        What each has room for; 0 for a disk that there is not.
    """

    def __init__(self, ram_bytes: int, disk_bytes: int) -> None:
        self._limits = (ram_bytes, disk_bytes)
        self._tiers: tuple[OrderedDict[Name, int], OrderedDict[Name, int]] = (OrderedDict(), OrderedDict())
        self._used = [0, 0]
        self._documents: dict[Name, str | None] = {}
        self._lock = threading.Lock()
        self._said = 0

    def note(self, library: Placing, chunks: Iterable[tuple[str, int]]) -> None:
        """Take note of chunks of a library that were used, by id, and the bytes of each."""
        sizes = {(library.namespace, id): nbytes for id, nbytes in chunks}
        with self._lock:
            unknown = [name for name in sizes if name not in self._documents]
        found: dict[Name, str | None] = {}
        with suppress(CacheBlendError):
            # Where names cannot be asked now, they are the next time.
            found = dict(zip(unknown, library.places([id for _, id in unknown]), strict=True)) if unknown else {}
        with self._lock:
            self._documents |= found
            for name, nbytes in sizes.items():
                self._keep(0, name, nbytes)

    def told(self) -> dict[str, object]:
        """Return what the router is told: a number that rises, and what RAM and disk hold."""
        with self._lock:
            self._said += 1
            ram, disk = (self._names(tier) for tier in self._tiers)
            return {"said": self._said, "ram": pack_numbers(ram), "disk": pack_numbers(disk)}

    def _keep(self, level: int, name: Name, nbytes: int) -> None:
        tier = self._tiers[level]
        self._used[level] += nbytes - tier.pop(name, 0)
        tier[name] = nbytes
        while self._used[level] > self._limits[level] and tier:
            old, size = tier.popitem(last=False)
            self._used[level] -= size
            if level == 0:
                self._keep(1, old, size)
            elif old not in self._tiers[0]:
                self._documents.pop(old, None)

    def _names(self, tier: OrderedDict[Name, int]) -> list[int]:
        names: Counter[str] = Counter()
        for name in reversed(tier):
            document = self._documents.get(name)
            names[name[1]] += 1
            if document is not None:
                names[document] += 1
            if len(names) >= _MOST_TOLD:
                break
        return [name_number(name) for name in names]
