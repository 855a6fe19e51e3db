"""What every command has in common: help, exit codes, one plain line for each mistake."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner as ClickRunner
from typer.main import get_command

from cacheblend_rag import __version__
from cacheblend_rag.cli.app import app
from tests.command import run


def commands(of: Any, *names: str) -> Iterator[str]:
    """A command and all below it, by what is typed."""
    yield " ".join(names)
    for name, command in getattr(of, "commands", {}).items():
        yield from commands(command, *names, name)


@pytest.mark.parametrize("command", list(commands(get_command(app))))
def test_every_command_explains_itself(command: str) -> None:
    assert "Usage:" in run(*command.split(), "--help").output


def test_the_version() -> None:
    assert run("--version").output.strip() == f"cacheblend-rag {__version__}"


@pytest.mark.parametrize(
    ("command", "package"),
    [("bench", "lab"), ("demo", "lab"), ("serve", "integrations/serve"), ("warm-ray", "integrations/ray")],
)
def test_a_command_of_another_package_names_it(command: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = get_command(app)
    monkeypatch.delitem(group.commands, command)  # type: ignore[attr-defined]
    result = ClickRunner().invoke(group, [command, "--help"])
    assert result.exit_code == 2
    assert f"pip install -c constraints.txt -e {package}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ("ask why --library missing", "missing"),
        ("store stats --store missing", "missing"),
        ("bench index --entries 1,many", "'many'"),
        ("warm empty --library new", "empty"),
        ("warm . --model missing/model --library new", "'missing/model'"),
        ("bench ttft --shape tiny --ratios 0,nan", "'0,nan'"),
        # These also show help.
        ("warm missing.txt", "'missing.txt' does not exist"),
        ("warm", "PATH"),
        ("ask ' '", "the question is empty"),
        ("bench ttft --json no/such/folder/x.json", "does not exist"),
        ("bake", "bake"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("Dear Mara")
    (tmp_path / "empty").mkdir()
    said = run(*shlex.split(arguments), code=2).stderr
    assert word in said
    if "--help" not in said:
        *progress, last = said.splitlines()
        assert last.startswith("error: ") and all(line.startswith("loading ") for line in progress)


def test_bad_environment(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "nan")
    result = run("warm", documents, "--model", "reference", "--library", tmp_path / "store", code=2)
    assert "recompute_ratio" in result.stderr
    assert len(result.stderr.splitlines()) == 1
