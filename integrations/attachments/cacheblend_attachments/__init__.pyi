from .auto import AutoRatio
from .calibration import calibrate
from .guard import Guard, GuardStatus

__all__ = ["AutoRatio", "Guard", "GuardStatus", "calibrate"]
