"""What measures cacheblend-rag, and trains: evaluation, benchmarks, families of models, the reference model."""
