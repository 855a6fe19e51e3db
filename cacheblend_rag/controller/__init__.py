"""The loading controller, which keeps the profile of one model."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import platformdirs
import torch
from pydantic import TypeAdapter

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller.measure import Measurement
from cacheblend_rag.controller.policy import (
    Choice,
    Profile,
    StoredKV,
    Work,
    cheapest_tier,
    choose,
    layer_compute_s,
    layer_load_s,
)
from cacheblend_rag.files import replace_text
from cacheblend_rag.fuse.plan import check_layers, check_selector
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader import loads_ahead
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVReader, KVStore
from cacheblend_rag.tuning import Tuning

__all__ = [
    "Controller",
    "Profile",
    "StoredKV",
    "Work",
    "cheapest_tier",
    "choose",
    "layer_compute_s",
    "layer_load_s",
    "load_profile",
    "profile_identity",
    "prompt_work",
    "save_profile",
]

_log = logging.getLogger(__name__)

_FORMAT = "cacheblend-rag profile 1"
_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


class Controller:
    """Chooses ratios for one model over one store (CacheBlend, section 5).

    The profile is read from its file, or measured when it is first needed: once for each model, machine and number of threads,
    within a few seconds and announced in the log. Calls must not overlap, nor run beside the model.

    Parameters
    ----------
    decoder : Decoder
        The model.
    blend : BlendConfig
        The engine's settings of blending, whose selector is measured.
    tuning : Tuning
        Where the profile is kept, how long measuring may take, and how layers are loaded.
    store : KVStore
        The store, whose tiers are measured; where it has a folder the profile is kept there, beside the KV.
    """

    def __init__(self, decoder: Decoder, blend: BlendConfig, tuning: Tuning, store: KVStore) -> None:
        self._decoder = decoder
        self._tuning = tuning
        self._store = store
        self._selector = check_selector(blend, decoder.num_layers)
        layers = check_layers(self._selector, decoder.num_layers)
        self._identity = profile_identity(decoder, self._selector.name, layers)
        self._profile: Profile | None = None
        self._asked = False
        self._unmeasured: set[tuple[str, str]] = set()

    def profile(self) -> Profile | None:
        """Return the profile, measuring it if there is none yet; None where `profile_budget_s` is 0 and there is no file."""
        if not self._asked:
            self._asked = True
            for path in self._paths():
                self._profile = self._profile or load_profile(path, self._identity)
            if self._profile is None and self._tuning.profile_budget_s > 0:
                _log.warning(
                    'measuring how fast this model is on this machine, for about %g s, so that recompute_ratio="auto" can '
                    "choose; it is done once",
                    self._tuning.profile_budget_s,
                )
                self.measure(self._tuning.profile_budget_s)
        return self._profile

    def measure(self, budget_s: float, progress: Callable[[str], None] | None = None) -> Profile:
        """Measure now, in about `budget_s` seconds, and keep the result; `progress` is called with what is measured."""
        measurement = Measurement(self._decoder, self._tuning, self._selector, budget_s, progress)
        self._profile = measurement.profile(self._identity, self._store.probes())
        self._asked = True
        for path in self._paths():
            try:
                save_profile(path, self._profile)
                break
            except OSError as error:
                _log.warning("the profile cannot be kept in %s: %s", path, error.strerror or error)
        return self._profile

    def choose(self, blend: BlendConfig, layout: PromptLayout, readers: Sequence[KVReader] | None) -> Choice:
        """Decide how a prompt is prefilled, at the quality floor where there is no profile.

        `readers` are those of the chunks that have stored KV; without them loading is taken to cost nothing, and only the choice
        of full prefill is final.
        """
        profile = self.profile()
        if profile is None:
            return Choice(0.0 if layout.remembers else blend.quality_ratio)
        packed_bytes: dict[tuple[str, str], list[int]] = {}
        for reader in readers or ():
            packed_bytes.setdefault((reader.tier, reader.codec), []).append(reader.packed_bytes)
        for place in packed_bytes:
            if profile.load_cost(*place) is None and place not in self._unmeasured:
                self._unmeasured.add(place)
                _log.warning(
                    "loading from tier %r in codec %r was never measured and is taken to be free; call `engine.profile()` with "
                    "these settings, or run `cacheblend-rag profile --store DIR` with CACHEBLEND_DISK_CODEC set to that codec",
                    *place,
                )
        stored = tuple(StoredKV(*place, len(sizes), sum(sizes)) for place, sizes in packed_bytes.items())
        return choose(profile, prompt_work(self._decoder, blend, self._tuning, layout, stored), blend.quality_ratio)

    def _paths(self) -> list[Path]:
        """Return where the profile may be, the best place first."""
        if self._tuning.profile_path is not None:
            return [self._tuning.profile_path.expanduser()]
        known = self._identity
        model, device, threads = known["architecture"][:16], known["device"].split()[-1].lower(), f"{known['threads']}t"
        selector = "".join(letter if letter.isalnum() else "-" for letter in known["selector"])
        name = "-".join([model, device, known["dtype"], threads, selector])
        # Tiers are as fast as the disk they are on: a profile belongs to the store it was measured with.
        folders = [self._store.path, Path(platformdirs.user_cache_dir("cacheblend-rag"))]
        return [folder / "profiles" / f"{name}.json" for folder in folders if folder is not None]


def prompt_work(
    decoder: Decoder, blend: BlendConfig, tuning: Tuning, layout: PromptLayout, stored: tuple[StoredKV, ...]
) -> Work:
    """Return what there is to do for a prompt whose KV is where `stored` says."""
    return Work(
        prompt_tokens=len(layout),
        context_tokens=layout.context_tokens,
        candidate_tokens=layout.candidate_rows.numel(),
        first_layer=min(check_layers(make_selector(blend.selector), decoder.num_layers), default=0),
        ahead=tuning.prefetch_layers,
        threaded=tuning.pipeline and loads_ahead(decoder, layout, {part.tier for part in stored}),
        stored=stored,
        remembers=layout.remembers,
    )


def profile_identity(decoder: Decoder, selector: str, check_layers: Sequence[int]) -> dict[str, str]:
    """Return what the speed of a model depends on; weights are no part of it: two of one architecture take the same time."""
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


def load_profile(path: Path, identity: dict[str, str]) -> Profile | None:
    """Read a profile, if there is one that is sound and was measured for this model and machine; warn if there is another."""
    try:
        whole = json.loads(path.read_bytes())
        if not isinstance(whole, dict) or whole.get("format") != _FORMAT:
            raise ValueError(f"it is not in the format {_FORMAT!r}")
        if whole.get("digest") != _digest(whole.get("profile")):
            raise ValueError("it does not match its digest")
        profile = _ADAPTER.validate_python(whole["profile"])
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("profile %s cannot be read (%s); it is measured again", path, error.strerror)
        return None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        _log.warning("profile %s is damaged or not ours (%s); it is measured again", path, reason)
        return None
    if profile.identity != identity:
        foreign = sorted(name for name in identity if profile.identity.get(name) != identity[name])
        _log.warning("profile %s was measured for another %s; it is measured again", path, " and ".join(foreign))
        return None
    return profile


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile so that it is there completely or not at all, readable by its owner alone; raises `OSError`."""
    body = json.loads(json.dumps(asdict(profile), allow_nan=False))
    text = json.dumps({"format": _FORMAT, "digest": _digest(body), "profile": body}, indent=1)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_text(path, text + "\n", private=True)


def _digest(body: object) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
