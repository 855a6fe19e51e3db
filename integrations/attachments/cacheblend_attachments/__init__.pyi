from .auto import AutoRatio
from .calibration import calibrate
from .guard import Guard, GuardStatus
from .inspector import InspectorPage, inspector_page

__all__ = ["AutoRatio", "Guard", "GuardStatus", "InspectorPage", "calibrate", "inspector_page"]
