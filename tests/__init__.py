"""The tests."""

import os

# What comes from a folder is compared exactly with what was computed.
os.environ["CACHEBLEND_DISK_CODEC"] = "native"
