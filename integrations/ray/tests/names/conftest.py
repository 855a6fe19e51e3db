"""Databases that keep the names of several machines."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sql

from tests.limits import wait_until
from tests.store.remote.conftest import free_port, wait_for_port


def tool(name: str) -> str | None:
    """Return a program of PostgreSQL, which Debian does not put among the commands."""
    return shutil.which(name) or next(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a PostgreSQL server of these tests."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (cacheblend-ray[postgres])")
    initdb, server = tool("initdb"), tool("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed")
    # It does not run as root.
    user = "postgres" if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if user is not None:
            shutil.chown(folder, user)
        port, data = free_port(), f"{folder}/data"
        command = [initdb, "-D", data, "-U", "test", "-A", "trust", "-E", "UTF8", "--no-sync"]
        subprocess.run(command, user=user, check=True, stdout=subprocess.DEVNULL)
        command = [server, "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", folder, "-F"]
        with subprocess.Popen(command, user=user, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for_port(port, process)
                url = f"postgresql+psycopg://test@127.0.0.1:{port}/postgres"
                wait_until(lambda: takes_questions(url))
                yield url
            finally:
                process.terminate()


@pytest.fixture(params=["sqlite", "postgresql"])
def names(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database without names."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/names.sqlite"
    url: str = request.getfixturevalue("postgres")
    run_sql(url, "DROP TABLE IF EXISTS cacheblend_log, cacheblend_units")
    return url


def takes_questions(url: str) -> bool:
    """Whether a database is there yet."""
    try:
        return bool(run_sql(url, "SELECT 1"))
    except sql.exc.OperationalError:
        return False


def run_sql(url: str, statement: str, **values: object) -> list[sql.Row[tuple[object, ...]]]:
    """Return the rows of a statement."""
    engine = sql.create_engine(url)
    with engine.begin() as connection:
        result = connection.execute(sql.text(statement), values)
        rows = list(result) if result.returns_rows else []
    engine.dispose()
    return rows
