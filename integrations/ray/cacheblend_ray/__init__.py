"""Many machines with Ray: Ray Data warms a corpus, Ray Serve answers from it, one store behind both."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
