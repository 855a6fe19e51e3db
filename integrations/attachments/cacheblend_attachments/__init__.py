"""Optional parts of an engine: attachments, for `BlendEngine.attach`, each in its module, calibration and the inspector."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
