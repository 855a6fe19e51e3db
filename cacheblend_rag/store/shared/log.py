"""What keeps the names of all machines: the state of each document, and the order in which they changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Behind", "NameLog", "Page"]


class Behind(Exception):
    """Others have changed names since the position that a change was made at: it is to be made again on what they left."""


@dataclass(frozen=True, slots=True)
class Page:
    """What has changed since a position.

    Attributes
    ----------
    birth : str
        Which log it is, and which change is at `position`: one that was lost and begun anew, or has lost its end and grown again,
        has another.
    position : int
        Up to where the page goes; 0 before the first change.
    changed : Mapping
        What each unit that has changed is now, by its name; None where it is no more.
    is_whole : bool
        Whether the position asked for was of another log or too long ago: what is not among `changed` may be no more.
    continues : bool
        Whether nothing that the log had at the position asked for is lost, as far as it still knows.
    """

    birth: str
    position: int
    changed: Mapping[str, bytes | None] = field(default_factory=dict)
    is_whole: bool = True
    continues: bool = False


class NameLog(Protocol):
    """Units (documents, and chunks of none), each of which changes as a whole; a change of several is one step for everybody.

    Every method raises `RemoteUnavailableError` where it is out of reach.
    """

    @property
    def location(self) -> str:
        """Where it is, without credentials."""

    def since(self, birth: str, position: int) -> Page:
        """Return what changed since a position, with the states of one moment; a page that is not whole has no units."""

    def units(self) -> Iterator[Mapping[str, bytes]]:
        """Yield all units, some at a time; what changes meanwhile may be found in either state, or not at all."""

    def change(self, birth: str, position: int, units: Mapping[str, bytes | None]) -> tuple[str, int]:
        """Give units their states, None for none, and return the log's birth and the position behind that.

        Raises
        ------
        Behind
            If something has changed since `position`.
        """

    def close(self) -> None:
        """Release connections."""
