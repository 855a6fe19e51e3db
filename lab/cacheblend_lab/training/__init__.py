"""The training of the reference model: ``python -m cacheblend_lab.training.train``."""
