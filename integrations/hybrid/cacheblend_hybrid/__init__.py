"""Models with recurrent layers behind the engine protocol: what is stored is the state at the end of a document behind a head."""

from cacheblend_hybrid.engine import HybridEngine

__all__ = ["HybridEngine"]
