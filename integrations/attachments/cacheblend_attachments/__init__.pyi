from .calibration import calibrate, calibrate_asking
from .compare import CompareAnswers, ComparedAnswers
from .inspector import InspectorPage, inspector_page
from .repair import Repair
from .snapkv import SnapKV
from .sources import SourceAttention

__all__ = [
    "CompareAnswers",
    "ComparedAnswers",
    "InspectorPage",
    "Repair",
    "SnapKV",
    "SourceAttention",
    "calibrate",
    "calibrate_asking",
    "inspector_page",
]
