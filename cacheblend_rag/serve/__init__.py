"""Answers over HTTP, for every client that talks to OpenAI's API; `cacheblend-rag serve` starts it."""
