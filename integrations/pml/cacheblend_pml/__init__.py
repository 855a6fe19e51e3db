"""The prompt markup language (Prompt Cache, section 3.2): schemas of reusable modules, and prompts that import them.

A `Schema` is read and validated without a model. `SchemaLayout` gives it the tokens of one, and `lay_out` a prompt its positions.
`Schemas` has an engine serve it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
