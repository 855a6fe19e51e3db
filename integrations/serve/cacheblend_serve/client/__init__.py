"""The engine of a server (`cacheblend-rag serve`), as the frameworks ask it."""
