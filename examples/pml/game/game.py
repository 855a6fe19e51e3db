"""The rules."""

from __future__ import annotations

from map import Map
from player import Player


class Game:
    """Players who take turns on a map until one is left."""

    def __init__(self, map: Map, players: list[Player]) -> None:
        self.map = map
        self.players = players
        self.turn = 0

    def start_game(self) -> None:
        """Give every player a unit on the diagonal."""
        for number, player in enumerate(self.players):
            self.map.place(player.recruit("scout"), number, number)

    def next_player(self) -> Player:
        """Return whose turn it is."""
        player = self.players[self.turn % len(self.players)]
        self.turn += 1
        return player

    def winner(self) -> Player | None:
        """Return the last player with units, if all others have lost."""
        left = [player for player in self.players if not player.has_lost]
        return left[0] if len(left) == 1 else None
