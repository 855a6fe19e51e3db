"""Measurement and training for cacheblend-rag: evaluation, benchmarks, families of models, the reference model."""
