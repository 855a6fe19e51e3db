"""Who plays."""

from __future__ import annotations

from unit import Unit


class Player:
    """A player and the units that are left."""

    def __init__(self, player_id: int, name: str) -> None:
        self.player_id = player_id
        self.name = name
        self.units: list[Unit] = []

    def recruit(self, name: str) -> Unit:
        """Add a unit."""
        unit = Unit(name, self.player_id)
        self.units.append(unit)
        return unit

    @property
    def has_lost(self) -> bool:
        """Whether no unit is left."""
        return not any(unit.health > 0 for unit in self.units)
