"""The `cacheblend-rag` command."""

from cacheblend_rag.cli.app import app

__all__ = ["app"]
