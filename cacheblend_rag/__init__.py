"""Reuse the KV of retrieved chunks: precomputed once, blended at query time.

The public names stand in ``__init__.pyi``; each is imported when it is first asked for, so that ``cacheblend-rag --help`` and the
submodules that need no model do not wait for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

__version__ = "0.1.0"
