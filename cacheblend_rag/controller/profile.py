"""What was measured of one model on one machine, and the file it is kept in."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError

from cacheblend_rag.model import Decoder

__all__ = [
    "BlendCost",
    "BlendPoint",
    "LoadCost",
    "PrefillCost",
    "PrefillPoint",
    "Profile",
    "fit_costs",
    "load_profile",
    "profile_identity",
    "save_profile",
]

_log = logging.getLogger(__name__)

_FORMAT = "cacheblend-rag profile 1"
# A profile has a few kilobytes; what is far larger is not one.
_MOST_BYTES = 1 << 20

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """Full prefill of so many tokens, the least disturbed run of several."""

    tokens: Count
    seconds: Amount


@dataclass(frozen=True, slots=True)
class BlendPoint:
    """Blended prefill without loading, so many rows computed of so many tokens, the least disturbed run of several."""

    rows: Count
    tokens: Count
    seconds: Amount


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Full prefill as a function of its length.

    Attributes
    ----------
    fixed_s, per_token_s, per_pair_s : float
        Seconds a prompt, a token, and a token times the prompt's tokens (attention).
    """

    fixed_s: Amount
    per_token_s: Amount
    per_pair_s: Amount

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a prompt of so many tokens."""
        return self.fixed_s + self.per_token_s * tokens + self.per_pair_s * tokens * tokens


@dataclass(frozen=True, slots=True)
class BlendCost:
    """The blended part of a prefill, loading apart, for one layer; `fixed_s` for the whole prompt.

    Attributes
    ----------
    fixed_s : float
        Seconds a prompt: hooks, embedding, head.
    per_token_s : float
        Seconds a token of the prompt and layer, computed or not: merging fresh KV into stored KV, the check layer's probe.
    per_row_s, per_pair_s : float
        Seconds a computed row and layer, and a computed row times the prompt's tokens (attention).
    """

    fixed_s: Amount
    per_token_s: Amount
    per_row_s: Amount
    per_pair_s: Amount

    def layer_s(self, rows: int, tokens: int) -> float:
        """Return the seconds of one layer that computes `rows` rows of a prompt of `tokens` tokens."""
        return self.per_token_s * tokens + self.per_row_s * rows + self.per_pair_s * rows * tokens


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Loading from one tier in one codec: reading, decoding, and putting the layer together.

    Attributes
    ----------
    tier, codec : str
        Where the KV is, and how its tensors are compressed.
    per_read_s, per_byte_s : float
        Seconds a chunk and layer, and a stored byte.
    overlap : float
        Share of the loading that could hide behind computing, and does: 1 where the two do not slow each other.
    bytes_per_token : float
        Stored bytes of one token, all layers together.
    """

    tier: str
    codec: str
    per_read_s: Amount
    per_byte_s: Amount
    overlap: Annotated[float, Field(ge=0, le=1)]
    bytes_per_token: Amount

    def layer_s(self, chunks: int, layer_bytes: float) -> float:
        """Return the seconds of loading one layer of so many chunks that has so many stored bytes in all."""
        return self.per_read_s * chunks + self.per_byte_s * layer_bytes


@dataclass(frozen=True)
class Profile:
    """How long one model takes on one machine to compute and to load; times in seconds.

    Attributes
    ----------
    identity : dict
        The model's architecture, device, threads, dtype and selector, by `profile_identity`: what the figures hold for.
    num_layers : int
        Decoder layers of the model.
    prefill, blend : PrefillCost, BlendCost
        Fitted to the points below.
    prefill_points, blend_points : tuple
        What was measured.
    loads : tuple of LoadCost
        One for each tier and codec measured.
    measured_s : float
        Seconds that the measuring took.
    """

    identity: dict[str, str]
    num_layers: Annotated[int, Field(ge=1)]
    prefill: PrefillCost
    blend: BlendCost
    prefill_points: tuple[PrefillPoint, ...]
    blend_points: tuple[BlendPoint, ...]
    loads: tuple[LoadCost, ...]
    measured_s: Amount

    def load_cost(self, tier: str, codec: str) -> LoadCost | None:
        """Return the cost of loading from a tier in a codec, or None where it was not measured."""
        return next((cost for cost in self.loads if (cost.tier, cost.codec) == (tier, codec)), None)

    def layer_s(self, tokens: int) -> float:
        """Return the seconds of one layer of full prefill."""
        return (self.prefill.seconds(tokens) - self.prefill.fixed_s) / self.num_layers


def profile_identity(decoder: Decoder, selector: str, check_layers: Sequence[int]) -> dict[str, str]:
    """Return what the speed of a model depends on.

    Weights are no part of it: two models of one architecture take the same time.

    Parameters
    ----------
    decoder : Decoder
        The model.
    selector : str
        The selector that blending is measured with.
    check_layers : sequence of int
        Its check layers.

    Returns
    -------
    dict of str to str
        `architecture`, a digest of the parameters' names, shapes and dtypes and of the attention implementation; `device`,
        `dtype`, `threads`, `torch` and `selector`.
    """
    model = decoder.model
    whole = hashlib.blake2b(type(model).__name__.encode(), digest_size=16)
    for name, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        whole.update(f"|{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
    whole.update(f"|{model.config.get_text_config(decoder=True)._attn_implementation}".encode())
    device = decoder.device
    return {
        "architecture": whole.hexdigest(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "selector": f"{selector} at {','.join(map(str, check_layers))}" if check_layers else selector,
    }


def fit_costs(
    columns: Sequence[Callable[[Any], float]], points: Sequence[Any], seconds: Sequence[float]
) -> list[float]:
    """Fit seconds as a sum of terms with factors of at least 0, the relative errors squared being least.

    Parameters
    ----------
    columns : sequence of callable
        Each gives one term's amount at a point.
    points : sequence
        Where it was measured.
    seconds : sequence of float
        What was measured there, above 0.

    Returns
    -------
    list of float
        One factor for each column.
    """
    measured = np.maximum(np.array(seconds, dtype=np.float64), 1e-9)
    amounts = np.array([[column(point) for column in columns] for point in points], dtype=np.float64)
    weighted = amounts / measured[:, None]
    # Columns differ by many powers of ten; the solver wants them alike.
    scale = np.maximum(np.abs(weighted).max(axis=0), 1e-30)
    best, best_error = np.zeros(len(columns)), np.inf
    # With at most four terms every set of those that are not zero can be tried.
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            part = list(chosen)
            factors = np.linalg.lstsq(weighted[:, part] / scale[part], np.ones(len(measured)), rcond=None)[0]
            if (factors < 0).any():
                continue
            error = float(np.square(weighted[:, part] / scale[part] @ factors - 1).sum())
            if error < best_error - 1e-12:
                best, best_error = np.zeros(len(columns)), error
                best[part] = factors / scale[part]
    return [float(factor) for factor in best]


_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


def load_profile(path: Path, identity: dict[str, str]) -> Profile | None:
    """Read a profile, if there is one that is sound and holds for this model and machine.

    Parameters
    ----------
    path : Path
        The file.
    identity : dict
        What it must have been measured for (`profile_identity`).

    Returns
    -------
    Profile or None
        None if there is no file; and, with a warning, if it cannot be trusted.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("profile %s cannot be read (%s); it is measured again", path, error.strerror)
        return None
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        whole = json.loads(data)
        if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
            raise ValueError(f"it is not in the format {_FORMAT!r}")
        if whole.get("digest") != _digest(whole.get("profile")):
            raise ValueError("it does not match its digest")
        profile = _ADAPTER.validate_python(whole["profile"])
    except (ValueError, RecursionError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        _log.warning("profile %s is damaged or not ours (%s); it is measured again", path, reason)
        return None
    if profile.identity != identity:
        foreign = sorted(name for name in identity if profile.identity.get(name) != identity[name])
        _log.warning("profile %s was measured for another %s; it is measured again", path, " and ".join(foreign))
        return None
    return profile


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile so that it is there completely or not at all, readable by its owner alone (mode 0600).

    Raises
    ------
    OSError
        If it cannot be written.
    """
    body = json.loads(json.dumps(asdict(profile), allow_nan=False))
    text = json.dumps({"format": _FORMAT, "digest": _digest(body), "profile": body}, indent=1)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _digest(body: object) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
