"""The controller: it keeps the profile of one model and decides with it, prompt by prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import platformdirs

from cacheblend_rag.codec import make_codec
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.controller.measure import Measurement
from cacheblend_rag.controller.plan import check_selector
from cacheblend_rag.controller.policy import Choice, StoredKV, Work, choose
from cacheblend_rag.controller.profile import Profile, load_profile, profile_identity, save_profile
from cacheblend_rag.layout import PromptLayout
from cacheblend_rag.loader import loads_ahead
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import SelectionTask
from cacheblend_rag.store.base import KVReader
from cacheblend_rag.store.probe import TierProbe, ram_probe

__all__ = ["Controller", "ProbedStore", "prompt_work", "stored_kv"]

_log = logging.getLogger(__name__)


@runtime_checkable
class ProbedStore(Protocol):
    """A store whose tiers can be measured."""

    @property
    def path(self) -> Path | None:
        """The folder beside whose KV the profile is kept, if there is one and it may be written."""

    def probes(self) -> list[TierProbe]:
        """Return what puts chunks into each tier only to measure how fast they are read."""


class Controller:
    """Chooses ratios for one model over one store (CacheBlend, section 5).

    The profile is read from its file, or measured when it is first needed: once for each model, machine and number of threads,
    within ``config.profile_budget_s`` and announced in the log. Calls must not overlap, nor run beside the model.

    Parameters
    ----------
    decoder : Decoder
        The model.
    config : BlendConfig
        The engine's settings: `profile_path` and `profile_budget_s`, and the selector that is measured.
    store : object
        The store; where it is a `ProbedStore` its tiers are measured, else RAM alone.
    """

    def __init__(self, decoder: Decoder, config: BlendConfig, store: object) -> None:
        self._decoder = decoder
        self._config = config
        self._store = store
        selector = check_selector(config, decoder.num_layers)
        layers = selector.begin(SelectionTask(PromptLayout((0,), (0,), ()), decoder.num_layers, 0)).check_layers
        self._identity = profile_identity(decoder, selector.name, layers)
        self._profile: Profile | None = None
        self._asked = False
        self._unmeasured: set[tuple[str, str]] = set()

    def profile(self) -> Profile | None:
        """Return the profile, measuring it if there is none yet; None where `profile_budget_s` is 0 and there is no file."""
        if not self._asked:
            self._asked = True
            for path in self._paths():
                self._profile = self._profile or load_profile(path, self._identity)
            if self._profile is None and self._config.profile_budget_s > 0:
                _log.warning(
                    'measuring how fast this model is on this machine, for about %g s, so that recompute_ratio="auto" can '
                    "choose; it is done once",
                    self._config.profile_budget_s,
                )
                self.measure(self._config.profile_budget_s)
        return self._profile

    def measure(self, budget_s: float, progress: Callable[[str], None] | None = None) -> Profile:
        """Measure now, and keep the result.

        Parameters
        ----------
        budget_s : float
            About how many seconds it may take.
        progress : callable, optional
            Called with what is measured now.
        """
        probes = (
            self._store.probes() if isinstance(self._store, ProbedStore) else [partial(ram_probe, make_codec("native"))]
        )
        self._profile = Measurement(self._decoder, self._config, budget_s, progress).profile(probes)
        self._asked = True
        self._keep(self._profile)
        return self._profile

    def choose(self, config: BlendConfig, layout: PromptLayout, readers: Sequence[KVReader] | None) -> Choice:
        """Decide how a prompt is prefilled.

        Parameters
        ----------
        config : BlendConfig
            The settings in force for this prompt.
        layout : PromptLayout
            The prompt.
        readers : sequence of KVReader, optional
            The stored KV of those chunks that have some; without them loading is taken to cost nothing, and only a choice to
            compute the whole prompt is final.

        Returns
        -------
        Choice
            The ratio is the quality floor where there is no profile.
        """
        profile = self.profile()
        if profile is None:
            return Choice(0.0 if layout.remembers else config.quality_ratio)
        stored = stored_kv(readers or ())
        for part in stored:
            place = (part.tier, part.codec)
            if profile.load_cost(*place) is None and place not in self._unmeasured:
                self._unmeasured.add(place)
                _log.warning(
                    "loading from tier %r in codec %r was never measured and is taken to be free; call `engine.profile()` with "
                    "these settings, or run `cacheblend-rag profile --store DIR` with CACHEBLEND_DISK_CODEC set to that codec",
                    *place,
                )
        return choose(profile, prompt_work(self._decoder, config, layout, stored), config.quality_ratio)

    def _paths(self) -> list[Path]:
        """Return where the profile may be, the best place first."""
        if self._config.profile_path is not None:
            return [self._config.profile_path.expanduser()]
        # Tiers are as fast as the disk they are on: a profile belongs to the store it was measured with.
        name = "-".join(
            [self._identity["architecture"][:16], self._identity["device"].split()[-1].lower(), *self._rest()]
        )
        folder = self._store.path if isinstance(self._store, ProbedStore) else None
        own = Path(platformdirs.user_cache_dir("cacheblend-rag")) / "profiles"
        return [*([folder / "profiles" / f"{name}.json"] if folder else []), own / f"{name}.json"]

    def _rest(self) -> list[str]:
        selector = "".join(letter if letter.isalnum() else "-" for letter in self._identity["selector"])
        return [self._identity["dtype"], f"{self._identity['threads']}t", selector]

    def _keep(self, profile: Profile) -> None:
        for path in self._paths():
            try:
                save_profile(path, profile)
            except OSError as error:
                _log.warning("the profile cannot be kept in %s: %s", path, error.strerror or error)
            else:
                return


def prompt_work(decoder: Decoder, config: BlendConfig, layout: PromptLayout, stored: tuple[StoredKV, ...]) -> Work:
    """Return what there is to do for a prompt.

    Parameters
    ----------
    decoder : Decoder
        The model.
    config : BlendConfig
        The settings in force: selector, check layers, `prefetch_layers`.
    layout : PromptLayout
        The prompt.
    stored : tuple of StoredKV
        Where its chunks' KV is.
    """
    num_layers, context = decoder.num_layers, layout.context_tokens
    selection = check_selector(config, num_layers).begin(SelectionTask(layout, num_layers, 0))
    return Work(
        prompt_tokens=len(layout),
        context_tokens=context,
        candidate_tokens=layout.candidate_rows.numel(),
        first_layer=min(selection.check_layers, default=0),
        ahead=config.prefetch_layers,
        threaded=config.pipeline and loads_ahead(context * decoder.kv_bytes_per_token // decoder.num_kv_layers),
        stored=stored,
        remembers=layout.remembers,
    )


def stored_kv(readers: Sequence[KVReader]) -> tuple[StoredKV, ...]:
    """Return where the chunks of these readers are, those of one tier and codec together."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for reader in readers:
        place = (reader.tier, reader.codec)
        chunks, kv_bytes = found.get(place, (0, 0))
        found[place] = (chunks + 1, kv_bytes + reader.packed_bytes)
    return tuple(StoredKV(*place, *amount) for place, amount in found.items())
