"""Points to where prompt markup is now."""

raise ImportError(
    "prompt markup is a package of its own: pip install cacheblend-pml, and import cacheblend_pml instead"
)
