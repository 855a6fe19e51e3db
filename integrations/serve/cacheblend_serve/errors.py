"""Errors that clients are told: what was wrong with their request, and nothing of this machine."""

from __future__ import annotations

import logging
import reprlib
import uuid
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from cacheblend_rag.errors import BackendError, StoreError
from cacheblend_serve.client.connection import KINDS

__all__ = ["Denied", "Overload", "error_body", "explained"]

logger = logging.getLogger(__name__)

_SENDERS = "invalid_request_error"
_PROBLEMS_SHOWN = 5
_PROBLEM_CHARS = 300
# No client is to try an unfinished answer again, as it does after a 500.
_STATUS = {"timeout": 504, "unknown_chunk": 404, "unfinished_answer": 422}


class Denied(Exception):
    """A request without a key that is known."""


class Overload(Exception):
    """A request that is not let in now: its sender asks too often, if `is_rate`, or all senders together too much."""

    def __init__(self, message: str, retry_after_s: float, *, is_rate: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_rate = is_rate


def error_body(message: str, kind: str = _SENDERS, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def explained(error: Exception) -> JSONResponse:
    """Return the response that tells of an error."""
    if isinstance(error, Denied):
        body = error_body(str(error), code="invalid_api_key")
        return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
    if isinstance(error, Overload):
        retry = {"Retry-After": str(max(1, round(error.retry_after_s + 0.5)))}
        if error.is_rate:
            return JSONResponse(error_body(str(error), "rate_limit_error", "rate_limit_exceeded"), 429, retry)
        return JSONResponse(error_body(str(error), "overloaded_error", "overloaded"), 503, retry)
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return JSONResponse(error_body("the request is nested too deeply; send JSON with fewer levels"), 400)
    if isinstance(error, RequestValidationError):
        param = _place(error.errors()[0]).partition(".")[0] or None
        return JSONResponse(error_body(_said(error), code="invalid_option", param=param), 400)
    if isinstance(error, HTTPException):
        return JSONResponse(error_body(str(error.detail)), error.status_code, error.headers)
    for code, kind in KINDS.items():
        if isinstance(error, kind) and kind is not StoreError:
            return JSONResponse(error_body(str(error), code=code), _STATUS.get(code, 400))
    # Paths, and what else of this machine stands in a message, are for its log.
    number = uuid.uuid4().hex[:12]
    logger.error("request %s failed", number, exc_info=error)
    if isinstance(error, StoreError | BackendError):
        what, name = ("store", "store_error") if isinstance(error, StoreError) else ("model", "server_error")
        text = f"the {what} cannot do that now; the server's log says why (request {number})"
        return JSONResponse(error_body(text, name, name), 503, {"Retry-After": "5"})
    text = f"something went wrong in the server; its log says what (request {number})"
    return JSONResponse(error_body(text, "server_error"), 500)


def _said(error: RequestValidationError) -> str:
    said = []
    for item in error.errors()[:_PROBLEMS_SHOWN]:
        if item["type"] == "json_invalid":
            said.append(f"the request is not JSON: {item['ctx']['error']} at character {item['loc'][-1]}")
            continue
        place = _place(item)
        told = (
            f"{place or 'the request (as Content-Type: application/json)'}: {item['msg'].removeprefix('Value error, ')}"
        )
        # An error of pydantic's own says what should have been, and not what there was.
        is_own = item["type"] not in ("missing", "value_error", "unknown_field")
        said.append(f"{told}, not {reprlib.repr(item['input'])}"[:_PROBLEM_CHARS] if is_own else told[:_PROBLEM_CHARS])
    return "; ".join(said)


def _place(item: Mapping[str, Any]) -> str:
    """Return which field of a request an error is about."""
    if item["type"] == "json_invalid":
        return ""
    field = item["ctx"]["field"] if item["type"] == "unknown_field" else None
    return ".".join(str(part) for part in (*item["loc"], field) if part not in ("body", None))
