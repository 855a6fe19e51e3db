from .client.engine import ServedEngine

__all__ = ["ServedEngine"]
