from .app import AppArgs, build_app
from .warming import WarmSummary, warm

__all__ = ["AppArgs", "WarmSummary", "build_app", "warm"]
