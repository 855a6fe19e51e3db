"""``python -m cacheblend_rag.cli`` is ``cacheblend-rag``."""

from cacheblend_rag.cli.app import app

app(prog_name="cacheblend-rag")
