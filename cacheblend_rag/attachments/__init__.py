"""What is optional on an engine: each module has one attachment, for `BlendEngine.attach`."""

from __future__ import annotations

from cacheblend_rag.attachments.guard import Guard, GuardStatus

__all__ = ["Guard", "GuardStatus"]
