"""A unit on the map."""

from __future__ import annotations


class Unit:
    """Something that a player owns, moves and fights with."""

    def __init__(self, name: str, owner_id: int, health: int = 10, strength: int = 3) -> None:
        self.name = name
        self.owner_id = owner_id
        self.health = health
        self.strength = strength
        self.position = (0, 0)

    def move_to(self, x: int, y: int) -> None:
        """Put the unit on another field."""
        self.position = (x, y)

    def attack(self, other: Unit) -> bool:
        """Hit another unit; return whether it is out of the game."""
        other.health -= self.strength
        return other.health <= 0
