"""Answers over HTTP, for every client that talks to OpenAI's API, and the engine by which frameworks ask such a server."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
