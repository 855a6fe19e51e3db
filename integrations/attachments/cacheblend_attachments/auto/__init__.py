"""Ratios that are chosen by what was measured of this machine: the loading controller of CacheBlend (section 5)."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import platformdirs
import torch
from pydantic import TypeAdapter

from cacheblend_attachments.auto.measure import Measurement
from cacheblend_attachments.auto.policy import (
    Profile,
    StoredKV,
    Work,
    choose,
    layer_compute_s,
    layer_load_s,
)
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.engine.attachment import Attachment
from cacheblend_rag.engine.request import Request
from cacheblend_rag.engine.scheduler import scheduler_of
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.files import replace_text
from cacheblend_rag.fuse.plan import check_layers
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader import loads_ahead
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import make_selector
from cacheblend_rag.store import KVReader
from cacheblend_rag.tuning import Tuning

__all__ = [
    "AutoRatio",
    "Profile",
    "StoredKV",
    "Work",
    "choose",
    "layer_compute_s",
    "layer_load_s",
    "load_profile",
    "profile_identity",
    "prompt_work",
    "save_profile",
]

_log = logging.getLogger(__name__)

_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


class AutoRatio(Attachment):
    """Chooses the ratio of each prompt whose call sets none, or full prefill (CacheBlend, section 5).

    It is the largest ratio that adds no delay; full prefill is chosen where that is no slower than blending at the least ratio.

    What it goes by, the profile, is read from its file, or measured when it is first needed: once for each model, machine and
    number of threads, within a few seconds and announced in the log.

    Parameters
    ----------
    quality_ratio : float
        The least ratio that it chooses, r* in CacheBlend (section 5), 0 to 1; the settings' own where that is larger.
    budget_s : float
        About how many seconds it may measure when it is first used and finds no file; 0 never measures, and chooses the least
        ratio.
    path : Path or str, optional
        The file of the profile; by default one in the folder of the store, or in the user's cache directory where there is none.

    Raises
    ------
    ConfigError
        If a value has no meaning.
    """

    def __init__(self, quality_ratio: float = 0.15, *, budget_s: float = 5.0, path: Path | str | None = None) -> None:
        if not isinstance(quality_ratio, int | float) or not 0 <= quality_ratio <= 1:
            raise ConfigError(f"quality_ratio={quality_ratio!r:.40} of AutoRatio must be a number from 0 to 1")
        if not isinstance(budget_s, int | float) or not 0 <= budget_s < math.inf:
            raise ConfigError(f"budget_s={budget_s!r:.40} of AutoRatio must be a finite number of seconds, 0 or more")
        self.quality_ratio = quality_ratio
        self._budget_s = budget_s
        self._path = None if path is None else Path(path).expanduser()
        self._profile: Profile | None = None
        self._asked = False
        self._unmeasured: set[tuple[str, str]] = set()

    def attached(self, engine: BlendEngine) -> None:
        self._engine = engine
        self._selector = make_selector(engine.blend.selector)

    def for_tenant(self) -> AutoRatio:
        other = copy.copy(self)
        other.leave = None
        return other

    def profile(self, *, budget_s: float | None = None, progress: Callable[[str], None] | None = None) -> Profile:
        """Measure how fast the engine's model computes and loads here, and keep that.

        Random tokens are prefilled and blended, and random KV is put into each tier of the store and read. Prompts wait
        meanwhile.

        Parameters
        ----------
        budget_s : float, optional
            About how many seconds it may take; by default those of the attachment. More time allows longer prompts and more
            repetitions.
        progress : callable, optional
            Called with what is currently being measured.

        Returns
        -------
        Profile
            What was measured; it is used from now on, and kept on disk.

        Raises
        ------
        UnsupportedModelError
            If the model cannot be blended.
        ConfigError
            If it is not attached to an engine, or `budget_s` is not above 0.
        """
        if self.leave is None:
            raise ConfigError("this AutoRatio is attached to no engine; call engine.attach(it) first")
        if self._engine.decoder is None:
            raise UnsupportedModelError(f"{self._engine.unsupported_reason}; there is nothing to profile")
        budget = self._budget_s if budget_s is None else budget_s
        if not 0 < budget < math.inf:
            raise ConfigError(
                f"a time limit of {budget} s leaves no time to measure; give a few seconds, for example 5"
            )
        with scheduler_of(self._engine.model):
            return self._measure(self._engine.decoder, budget, progress)

    def choose(self, request: Request, readers: Sequence[KVReader] | None) -> tuple[float, str | None]:
        blend, layout, decoder = request.blend, request.prompt.layout, self._engine.decoder
        # Only what can be blended is to be chosen for.
        assert decoder is not None
        least = max(self.quality_ratio, blend.recompute_ratio)
        with scheduler_of(self._engine.model).within(request.patience):
            profile = self._known(decoder)
        if profile is None:
            return least, None
        packed_bytes: dict[tuple[str, str], list[int]] = {}
        for reader in readers or ():
            packed_bytes.setdefault((reader.tier, reader.codec), []).append(reader.packed_bytes)
        for place in packed_bytes:
            if profile.load_cost(*place) is None and place not in self._unmeasured:
                self._unmeasured.add(place)
                _log.warning(
                    "loading from tier %r in codec %r was never measured and is assumed free; call `profile()` of AutoRatio "
                    "with these settings, or run `cacheblend-rag profile --store DIR` with CACHEBLEND_DISK_CODEC set to it",
                    *place,
                )
        stored = tuple(StoredKV(*place, len(sizes), sum(sizes)) for place, sizes in packed_bytes.items())
        work = prompt_work(decoder, blend, self._engine.tuning, layout, stored)
        choice = choose(profile, work, least)
        return choice.ratio, choice.fallback_reason

    def _known(self, decoder: Decoder) -> Profile | None:
        """Return the profile, measured if there is none yet; None where nothing may be measured and there is no file."""
        if not self._asked:
            self._asked = True
            identity = self._identity(decoder)
            found = (load_profile(path, identity) for path in self._paths(identity))
            self._profile = next(filter(None, found), None)
            if self._profile is None and self._budget_s > 0:
                _log.warning(
                    "measuring the speed of this model on this machine for about %g s, so that AutoRatio can choose (done once)",
                    self._budget_s,
                )
                self._measure(decoder, self._budget_s, None)
        return self._profile

    def _measure(self, decoder: Decoder, budget_s: float, progress: Callable[[str], None] | None) -> Profile:
        """Measure, and keep the result."""
        identity, store = self._identity(decoder), self._engine.store
        measurement = Measurement(decoder, self._engine.tuning, self._selector, budget_s, progress)
        self._profile, self._asked = measurement.profile(identity, store.samples()), True
        for path in self._paths(identity):
            try:
                save_profile(path, self._profile)
                break
            except OSError as error:
                _log.warning("the profile cannot be kept in %s: %s", path, error.strerror or error)
        return self._profile

    def _identity(self, decoder: Decoder) -> dict[str, str]:
        return profile_identity(decoder, self._selector.name, check_layers(self._selector, decoder.num_layers))

    def _paths(self, known: dict[str, str]) -> list[Path]:
        """Return where the profile may be, the best place first."""
        if self._path is not None:
            return [self._path]
        model, device, threads = known["architecture"][:16], known["device"].split()[-1].lower(), f"{known['threads']}t"
        selector = "".join(letter if letter.isalnum() else "-" for letter in known["selector"])
        name = "-".join([model, device, known["dtype"], threads, selector])
        # Tiers are as fast as the disk they are on: a profile belongs to the store it was measured with.
        folders = [self._engine.store.path, Path(platformdirs.user_cache_dir("cacheblend-rag"))]
        return [folder / "profiles" / f"{name}.json" for folder in folders if folder is not None]


def prompt_work(
    decoder: Decoder, blend: BlendConfig, tuning: Tuning, layout: PromptLayout, stored: tuple[StoredKV, ...]
) -> Work:
    """Return what there is to do for a prompt whose KV is where `stored` says."""
    return Work(
        prompt_tokens=len(layout),
        context_tokens=layout.context_tokens,
        candidate_tokens=layout.context_rows.numel(),
        first_layer=min(check_layers(make_selector(blend.selector), decoder.num_layers), default=0),
        ahead=tuning.prefetch_layers,
        threaded=loads_ahead(decoder, layout, {part.tier for part in stored}),
        stored=stored,
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
        profile = _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("profile %s cannot be read (%s); it is measured again", path, error.strerror)
        return None
    except ValueError:
        _log.warning("profile %s is damaged or not ours; it is measured again", path)
        return None
    if profile.identity != identity:
        foreign = sorted(name for name in identity if profile.identity.get(name) != identity[name])
        _log.warning("profile %s was measured for another %s; it is measured again", path, " and ".join(foreign))
        return None
    return profile


def save_profile(path: Path, profile: Profile) -> None:
    """Write a profile so that it is there completely or not at all, readable by its owner alone; raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_text(path, _ADAPTER.dump_json(profile, indent=1).decode() + "\n", private=True)
