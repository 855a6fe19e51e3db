"""The inspector: one page that shows what became of every token of a prompt, and where the time went."""

from cacheblend_rag.page.inspector import framed, inspector_page

__all__ = ["framed", "inspector_page"]
