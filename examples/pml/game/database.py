"""Where games are kept."""

from __future__ import annotations

import json
from pathlib import Path


class Database:
    """Scores of finished games, in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> dict[str, int]:
        """Return how many games each player has won."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def add_win(self, name: str) -> None:
        """Count one more game for a player."""
        scores = self.load()
        scores[name] = scores.get(name, 0) + 1
        self.path.write_text(json.dumps(scores))
