"""The demonstration's documents, and questions about them whose answers are known.

The documents are pages of the Python language reference, which every Python brings along: real text, and nothing to download.
"""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_attachments.answers import holds_answer

__all__ = ["QUESTIONS", "Asked", "pages"]

_PAGES = (
    "assert",
    "binary",
    "break",
    "context-managers",
    "continue",
    "del",
    "for",
    "global",
    "imaginary",
    "integers",
    "lambda",
    "nonlocal",
    "numbers",
    "pass",
    "power",
    "raise",
    "return",
    "shifting",
    "while",
)


@dataclass(frozen=True)
class Asked:
    """A question about the pages, and words of which a right answer holds any."""

    text: str
    answers: tuple[str, ...]

    def is_answered_by(self, answer: str) -> bool:
        """Whether an answer holds a right one."""
        return any(holds_answer(answer, each) or each in answer for each in self.answers)


QUESTIONS = (
    Asked("Which exception does an assert statement raise when its condition is false?", ("AssertionError",)),
    Asked("Which loop does the break statement terminate?", ("nearest", "enclosing loop")),
    Asked("Which exception is raised when an unbound name is deleted with del?", ("NameError",)),
    Asked("In which order are the targets of a del statement deleted?", ("left to right",)),
    Asked("What happens when the pass statement is executed?", ("nothing",)),
    Asked("Which exception does raise raise when there is no active exception to re-raise?", ("RuntimeError",)),
    Asked("Which operator is used for matrix multiplication?", ("@",)),
    Asked("Which exception is raised by division by zero?", ("ZeroDivisionError",)),
    Asked("What kind of functions do lambda expressions create?", ("anonymous",)),
    Asked("What does a return statement return when it has no expression list?", ("None",)),
    Asked("Which characters in integer literals are ignored when their value is determined?", ("underscores", "_")),
    Asked("What is the real part of the complex number that an imaginary literal yields?", ("0.0", "0")),
    Asked("What does raising a negative number to a fractional power result in?", ("complex",)),
    Asked("What does raising 0.0 to a negative power result in?", ("ZeroDivisionError",)),
    Asked("How many types of numeric literals are there?", ("three", "3")),
    Asked("What is the for statement used to iterate over?", ("sequence", "iterable")),
    Asked("What does the continue statement continue with?", ("next cycle", "next iteration")),
    Asked("What is the while statement used for?", ("repeated execution",)),
    Asked("What is a right shift by n bits defined as?", ("floor division", "pow(2,n)", "pow(2, n)")),
    Asked("Who handles the entry into and the exit from a runtime context?", ("context manager",)),
)
"""They are asked through either framework in turn."""


def pages() -> dict[str, str]:
    """Return the pages by their names."""
    from pydoc_data.topics import topics

    return {name: topics[name] for name in _PAGES if name in topics}
