"""The `cacheblend-rag` command."""
