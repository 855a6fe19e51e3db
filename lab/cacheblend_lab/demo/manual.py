"""The demonstration's documents, and questions about them whose answers are known.

The documents are pages of the Python language reference, which every Python brings along: real text, and nothing to download.
"""

from __future__ import annotations

from cacheblend_lab.sets import Question

__all__ = ["QUESTIONS", "pages"]

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


QUESTIONS = (
    Question("Which exception does an assert statement raise when its condition is false?", ("AssertionError",)),
    Question("Which loop does the break statement terminate?", ("nearest", "enclosing loop")),
    Question("Which exception is raised when an unbound name is deleted with del?", ("NameError",)),
    Question("In which order are the targets of a del statement deleted?", ("left to right",)),
    Question("What happens when the pass statement is executed?", ("nothing",)),
    Question("Which exception does raise raise when there is no active exception to re-raise?", ("RuntimeError",)),
    Question("Which operator is used for matrix multiplication?", ("@",)),
    Question("Which exception is raised by division by zero?", ("ZeroDivisionError",)),
    Question("What kind of functions do lambda expressions create?", ("anonymous",)),
    Question("What does a return statement return when it has no expression list?", ("None",)),
    Question("Which characters in integer literals are ignored when their value is determined?", ("underscores", "_")),
    Question("What is the real part of the complex number that an imaginary literal yields?", ("0.0", "0")),
    Question("What does raising a negative number to a fractional power result in?", ("complex",)),
    Question("What does raising 0.0 to a negative power result in?", ("ZeroDivisionError",)),
    Question("How many types of numeric literals are there?", ("three", "3")),
    Question("What is the for statement used to iterate over?", ("sequence", "iterable")),
    Question("What does the continue statement continue with?", ("next cycle", "next iteration")),
    Question("What is the while statement used for?", ("repeated execution",)),
    Question("What is a right shift by n bits defined as?", ("floor division", "pow(2,n)", "pow(2, n)")),
    Question("Who handles the entry into and the exit from a runtime context?", ("context manager",)),
)
"""They are asked through either framework in turn."""


def pages() -> dict[str, str]:
    """Return the pages by their names."""
    from pydoc_data.topics import topics

    return {name: topics[name] for name in _PAGES if name in topics}
