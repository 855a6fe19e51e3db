"""Measurement for cacheblend-rag: evaluation, benchmarks, families of models, the small model of the tests."""
