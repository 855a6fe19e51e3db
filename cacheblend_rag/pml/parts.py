"""What a laid-out schema and a laid-out prompt consist of: parts that are encoded, and segments at positions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

__all__ = ["LaidOutPrompt", "Part", "PromptSegment", "Slot"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a parameter in a part: filler tokens at positions that an argument's tokens take over.

    Attributes
    ----------
    module : str
        The module that has the parameter.
    parameter : str
        The parameter's name.
    start, stop : int
        The half-open range of its rows in the part's tokens; ``stop - start`` is the parameter's length.
    """

    module: str
    parameter: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Part:
    """Tokens that are encoded together and apart from all others, and whose KV is kept.

    A part is the own tokens of one module (those of the modules nested in it are parts of their own), an anonymous text, or
    what a prompt imports of a scaffold.

    Attributes
    ----------
    name : str
        The module's name; ``"#1"``, ``"#2"`` ... for anonymous texts in reading order; for a scaffold the names of what is
        in it, joined by ``"+"``.
    token_ids : tuple of int
        Its tokens in order of position, parameters as filler tokens.
    positions : tuple of int
        The position of each token in the schema, ascending. Where other modules stand between a module's texts there are gaps.
    slots : tuple of Slot
        Its parameters, ascending.
    is_scaffold : bool
        Whether several modules are encoded together.
    """

    name: str
    token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[Slot, ...] = ()
    is_scaffold: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def start(self) -> int:
        """The position of its first token."""
        return self.positions[0]

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.positions[-1] + 1

    @property
    def is_contiguous(self) -> bool:
        """Whether its tokens follow each other without gaps."""
        return self.stop - self.start == len(self)


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens of a prompt that follow each other without gaps and come from one place.

    Attributes
    ----------
    token_ids : tuple of int
        The tokens that the model reads.
    position : int
        The position of the first one; the others follow by one.
    part : int or None
        For tokens served from KV: the index of their part in `LaidOutPrompt.parts`. None for tokens that are computed: new
        text, arguments, the BOS.
    row : int
        For tokens served from KV: the row of the first one in the part.
    module : str or None
        The module that they belong to, also for arguments; None for anonymous text and new text.
    parameter : str or None
        For an argument: the parameter that it is for.
    """

    token_ids: tuple[int, ...]
    position: int
    part: int | None = None
    row: int = 0
    module: str | None = None
    parameter: str | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        """The position behind the last token."""
        return self.position + len(self.token_ids)

    @property
    def is_cached(self) -> bool:
        """Whether the tokens are served from KV."""
        return self.part is not None


@dataclass(frozen=True)
class LaidOutPrompt:
    """A prompt as the model reads it.

    Attributes
    ----------
    segments : tuple of PromptSegment
        In order of position, not overlapping, none empty. The first one holds the BOS, where the tokenizer has one. The last
        one is computed, unless the prompt ends with a module and there is no chat template.
    parts : tuple of Part
        The parts that cached segments are cut from, each once. Rows of a part that no segment takes are filler tokens.
    """

    segments: tuple[PromptSegment, ...]
    parts: tuple[Part, ...]

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens in order."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @cached_property
    def positions(self) -> tuple[int, ...]:
        """The position of each token, ascending."""
        return tuple(position for segment in self.segments for position in range(segment.position, segment.stop))

    @property
    def cached_tokens(self) -> int:
        """How many tokens are served from KV."""
        return sum(len(segment) for segment in self.segments if segment.is_cached)
