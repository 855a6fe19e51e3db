from .auto import AutoRatio
from .calibration import calibrate
from .guard import Guard, GuardStatus
from .inspector import InspectorPage, inspector_page
from .repair import Repair
from .snapkv import SnapKV
from .sources import SourceAttention
from .watching import WatchedPrefill, watch_prefill

__all__ = [
    "AutoRatio",
    "Guard",
    "GuardStatus",
    "InspectorPage",
    "Repair",
    "SnapKV",
    "SourceAttention",
    "WatchedPrefill",
    "calibrate",
    "inspector_page",
    "watch_prefill",
]
