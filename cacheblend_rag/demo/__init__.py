"""The demonstration: fictional documents, a real Chroma, a real embedding model, two frameworks, three ways to answer."""

from __future__ import annotations

from cacheblend_rag.demo.corpus import demo_documents, demo_questions

__all__ = ["demo_documents", "demo_questions"]
