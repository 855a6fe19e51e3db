"""The demonstration's documents, which the reference model can read, and questions about them."""

from __future__ import annotations

from cacheblend_rag.demo.corpus import demo_documents, demo_questions

__all__ = ["demo_documents", "demo_questions"]
