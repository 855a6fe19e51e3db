"""The fields that units stand on."""

from __future__ import annotations

from unit import Unit


class Map:
    """A square of fields, each empty or taken by one unit."""

    def __init__(self, grid_size: int) -> None:
        self.grid_size = grid_size
        self.units: dict[tuple[int, int], Unit] = {}

    def is_free(self, x: int, y: int) -> bool:
        """Return whether a field is on the map and empty."""
        return 0 <= x < self.grid_size and 0 <= y < self.grid_size and (x, y) not in self.units

    def place(self, unit: Unit, x: int, y: int) -> None:
        """Put a unit on a free field."""
        if not self.is_free(x, y):
            raise ValueError(f"field {x}, {y} is taken, or not on the map")
        self.units.pop(unit.position, None)
        self.units[x, y] = unit
        unit.move_to(x, y)
