"""What measures and trains: evaluation, benchmarks, the training of the reference model, families of models.

The core imports none of it.
"""
