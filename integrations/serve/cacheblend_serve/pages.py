"""The inspector's pages of answers that were kept on request: for a while, in memory, for the requester alone."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from cacheblend_attachments import inspector_page
from cacheblend_rag.engine import ChunkLibrary
from cacheblend_rag.errors import PromptError
from cacheblend_rag.report import BlendReport
from cacheblend_serve.auth import Owner

__all__ = ["PAGE_HEADERS", "KeptPages"]

PAGE_HEADERS = {
    # A page's style stands in it, and nothing is run or loaded from elsewhere.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers that a page is sent with: it holds prompts and answers."""

# Pages of one asker; a further one takes the oldest one's place.
_MOST = 32


@dataclass(frozen=True)
class _Page:
    html: str
    made: float
    line: str


class KeptPages:
    """Pages by their names, which cannot be guessed, for those who asked for them.

    Parameters
    ----------
    kept_s : float or None
        Seconds that a page is kept; None keeps none.
    clock : callable
        Seconds, from any moment on.
    """

    def __init__(self, kept_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._kept_s = kept_s
        self._clock = clock
        self._lock = threading.Lock()
        self._pages: dict[str, OrderedDict[str, _Page]] = {}

    def check(self) -> None:
        """Raise `PromptError` if this server keeps none."""
        if self._kept_s is None:
            raise PromptError("this server keeps no pages of answers; leave keep out, or start it with pages_s")

    def keep(self, owner: Owner, library: ChunkLibrary, report: BlendReport) -> str:
        """Keep the page of an answer and return its address on this server; `PromptError` if this server keeps none."""
        self.check()
        html = inspector_page(library, report)
        name = secrets.token_urlsafe(16)
        with self._lock:
            self._forget_old()
            pages = self._pages.setdefault(owner.digest, OrderedDict())
            pages[name] = _Page(html, self._clock(), str(report))
            while len(pages) > _MOST:
                pages.popitem(last=False)
        return f"/ui/{name}"

    def page(self, owner: Owner, name: str) -> str | None:
        """Return a page; None if its asker has none of that name, or has it no more."""
        with self._lock:
            self._forget_old()
            pages = self._pages.get(owner.digest)
            page = None if pages is None else pages.get(name)
        return None if page is None else page.html

    def index(self, owner: Owner) -> str:
        """Return a page with the addresses of an asker's pages, the newest first."""
        with self._lock:
            self._forget_old()
            pages = list(self._pages.get(owner.digest, OrderedDict()).items())
            now = self._clock()
        lines = [
            f'<li><a href="/ui/{name}">{now - page.made:.0f} s ago</a> {escape(page.line)}</li>'
            for name, page in reversed(pages)
        ]
        body = f"<ul>{''.join(lines)}</ul>" if lines else "<p>Answers that are asked for with keep are listed here.</p>"
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Answers</title><h1>Answers</h1>{body}</html>'
        )

    def _forget_old(self) -> None:
        if self._kept_s is None:
            return
        oldest = self._clock() - self._kept_s
        for owner, pages in list(self._pages.items()):
            while pages and next(iter(pages.values())).made < oldest:
                pages.popitem(last=False)
            if not pages:
                del self._pages[owner]
