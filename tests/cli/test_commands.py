"""What every command has in common: help, exit codes, one plain line for each mistake."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner as ClickRunner
from typer.main import get_command

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


@pytest.mark.parametrize(
    ("command", "package"),
    [("bench", "rag-lab"), ("demo", "rag-lab"), ("serve", "serve"), ("warm-ray", "ray")],
)
def test_a_command_of_another_package_names_it(command: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = get_command(app)
    monkeypatch.delitem(group.commands, command)  # type: ignore[attr-defined]
    result = ClickRunner().invoke(group, [command, "--help"])
    assert result.exit_code == 2
    assert (
        result.stderr == f"error: the command {command} comes with another package: pip install cacheblend-{package}\n"
    )


def test_the_version() -> None:
    from cacheblend_rag import __version__

    assert run("--version").output.strip() == f"cacheblend-rag {__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ask why --store missing", "nothing was warmed into missing"),
        ("store stats --store missing", "there is no store in missing"),
        ("store clear --yes --store missing", "there is no store in missing"),
        ("bench index --entries 1,many", "'many' in '1,many' is not a whole number"),
        ("warm empty --store new", "no text found in empty"),
        ("warm . --model missing/model --store new", "model 'missing/model' cannot be loaded"),
        ("demo --model ./missing", "model ./missing cannot be loaded: there is no such folder, and no such GGUF file"),
        ("bench ttft --shape round", "shape 'round' is unknown"),
        ("bench ttft --shape tiny --ratios 0,nan", "'0,nan' holds a number that is not finite"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("Dear Mara")
    (tmp_path / "empty").mkdir()
    *progress, said = run(*arguments.split(), code=2).stderr.splitlines()
    assert said.startswith("error: ")
    assert message in said
    assert all(line.startswith("loading ") for line in progress)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("warm missing.txt", "'missing.txt' does not exist"),
        ("warm", "PATH"),
        ("ask ' '", "the question is empty"),
        ("bench ttft --chunks 0", "--chunks"),
        ("bench ttft --json no/such/folder/x.json", "does not exist"),
        ("bake", "bake"),
    ],
)
def test_a_wrong_call_shows_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*shlex.split(arguments), code=2)
    assert message in result.stderr
    assert "--help" in result.stderr


def test_bad_environment(model_folder: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHEBLEND_RECOMPUTE_RATIO", "nan")
    result = run("warm", documents, "--model", model_folder, "--store", tmp_path / "store", code=2)
    assert "recompute_ratio" in result.stderr
    assert len(result.stderr.splitlines()) == 1
