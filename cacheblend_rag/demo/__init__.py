"""The demonstration: fictional documents, a real Chroma, a real embedding model, two frameworks, three ways to answer."""

from __future__ import annotations

from cacheblend_rag.demo.framework import DemoEngine
from cacheblend_rag.demo.rows import DemoRow, Ingestion, Summary, summarize
from cacheblend_rag.demo.run import run_demo

__all__ = ["DemoEngine", "DemoRow", "Ingestion", "Summary", "run_demo", "summarize"]
