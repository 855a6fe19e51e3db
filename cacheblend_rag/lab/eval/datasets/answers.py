"""The value that is judged, taken out of what a model goes on to write."""

from __future__ import annotations

__all__ = ["code_line", "first_line"]

_NOT_CODE = ("`", "#", "//")


def first_line(answer: str) -> str:
    """Return the first line that is not blank, stripped; models go on with another question where examples came before."""
    return answer.strip().split("\n", 1)[0].strip()


def code_line(answer: str) -> str:
    """Return the first line that is neither blank nor a comment nor a fence, with its indentation; empty if there is none."""
    for line in answer.split("\n"):
        if line.strip() and not any(mark in line for mark in _NOT_CODE):
            return line.rstrip("\r")
    return ""
