"""Commands, called in this process."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from cacheblend_rag.cli.app import app


def run(line: object, *arguments: object, code: int = 0, input: str | None = None) -> Result:
    """Run a command, the first words of which may be in one string; fail unless its exit code is the one given."""
    result = CliRunner().invoke(app, [*str(line).split(), *map(str, arguments)], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that a command wrote, every row having every key."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert {"command", "date", "versions", "machine", "rows"} <= whole.keys()
    rows: list[dict[str, Any]] = whole["rows"]
    assert rows
    assert all(row.keys() == rows[0].keys() for row in rows)
    return rows
