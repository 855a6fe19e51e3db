"""What stands between a remote tier and its failures: circuit breakers, and messages without credentials."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cacheblend_rag.errors import RemoteUnavailableError, StoreError
from cacheblend_rag.store.locks import ForkSafeLock
from cacheblend_rag.store.remote.base import RemoteSettings

__all__ = ["Breaker", "Guard"]


class Breaker:
    """Leaves what failed alone for a while, twice as long after every failure in a row; then one call tries it for all.

    Parameters
    ----------
    back_off_s, max_back_off_s : float
        How long: after the first failure, and at most.
    clock : callable
        The time in seconds; only differences matter.
    """

    def __init__(self, back_off_s: float, max_back_off_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._back_off_s = back_off_s
        self._max_back_off_s = max_back_off_s
        self._clock = clock
        self._lock = ForkSafeLock()
        self._turn = 0
        self._wait_s = 0.0
        self._retry_at = 0.0
        self._reason = ""

    def enter(self) -> int:
        """Return the turn that a call belongs to, for `failed` or `succeeded`.

        Raises
        ------
        RemoteUnavailableError
            If it is not time to try again.
        """
        with self._lock:
            if self._wait_s:
                left_s = self._retry_at - self._clock()
                if left_s > 0:
                    raise RemoteUnavailableError(f"{self._reason}; it is left alone for {left_s:.1f} s more")
                # This call tries for all. Until it has an answer, or as long again has passed, the others fail at once.
                self._retry_at += self._wait_s - left_s
                self._turn += 1
            return self._turn

    def failed(self, turn: int, reason: str) -> None:
        """Begin to wait. Calls that were under way together and all fail count as one failure."""
        with self._lock:
            if turn == self._turn:
                self._turn += 1
                self._wait_s = min(self._wait_s * 2 or self._back_off_s, self._max_back_off_s)
                self._retry_at = self._clock() + self._wait_s
                self._reason = reason

    def succeeded(self, turn: int) -> None:
        """Stop waiting."""
        with self._lock:
            if turn == self._turn:
                self._wait_s = 0.0


class Guard:
    """Runs the calls of a remote tier and turns what they raise into `RemoteUnavailableError`.

    A refused write (no room, no permission) stops writes for a while and reads go on; any other failure stops both.

    Parameters
    ----------
    location : str
        Where the tier is, for messages.
    secrets : list of str
        What no message may show.
    settings : RemoteSettings
        The back-off times.
    caught : tuple of exception types
        What the client raises.
    is_refusal : callable
        Whether an exception means that the tier is well and refused the call.
    """

    def __init__(
        self,
        location: str,
        secrets: list[str],
        settings: RemoteSettings,
        caught: tuple[type[Exception], ...],
        is_refusal: Callable[[Exception], bool],
    ) -> None:
        self.location = location
        # The longest first: one may be part of another.
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self._caught = caught
        self._is_refusal = is_refusal
        self._reach = Breaker(settings.back_off_s, settings.max_back_off_s)
        self._writes = Breaker(settings.back_off_s, settings.max_back_off_s)
        self.closed = False

    @contextmanager
    def calling(self, what: str, writing: bool = False) -> Iterator[None]:
        """Run calls to the remote tier; `what` they do is for the message."""
        if self.closed:
            raise RemoteUnavailableError(f"remote tier {self.location} is closed; open it again")
        write_turn = self._writes.enter() if writing else 0
        turn = self._reach.enter()
        try:
            yield
        except StoreError:
            self._reach.succeeded(turn)
            raise
        except self._caught as error:
            reason, cause = self._told(what, error)
            if self._is_refusal(error):
                self._reach.succeeded(turn)
                if writing:
                    self._writes.failed(write_turn, reason)
            else:
                self._reach.failed(turn, reason)
            raise RemoteUnavailableError(reason) from cause
        self._reach.succeeded(turn)
        if writing:
            self._writes.succeeded(write_turn)

    def _told(self, what: str, error: Exception) -> tuple[str, Exception | None]:
        text = " ".join(str(error).split())[:300] or "no reason given"
        shown = text
        for secret in self._secrets:
            shown = shown.replace(secret, "***")
        # A cause is printed with its own message, and with that of its own cause; it is left out where they may tell a secret.
        causes: list[str] = []
        each = error.__cause__ or error.__context__
        while each is not None and len(causes) < 10:
            causes.append(str(each))
            each = each.__cause__ or each.__context__
        silent = any(secret in told for told in [str(error), *causes] for secret in self._secrets)
        return (
            f"remote tier {self.location} could not {what}: {type(error).__name__}: {shown}",
            None if silent else error,
        )
