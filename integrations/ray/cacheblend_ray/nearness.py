"""Which replica has most of what a request names, by what the replicas say they hold and what they were sent since."""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

__all__ = ["Choice", "Nearness", "name_number", "pack_numbers"]

# A name that nobody holds goes to the replica that it belongs to, if that is all there is to say.
_IN_RAM, _ON_DISK, _AT_HOME = 1.0, 0.5, 0.1
# Names that were sent to a replica and that it has not spoken of yet.
_MOST_SENT = 16_384


def name_number(name: str) -> int:
    """Return the number, of 64 bits, that stands for a name where replicas say what they hold."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Return numbers of names as what replicas send."""
    return array("Q", numbers).tobytes()


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a request may go.

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
    """What is known of a replica; `said` is the number of its last report."""

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
