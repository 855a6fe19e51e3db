from .guard import Guard, GuardStatus

__all__ = ["Guard", "GuardStatus"]
