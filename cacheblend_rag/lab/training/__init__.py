"""The training of the reference model: ``python -m cacheblend_rag.lab.training.train``."""
