"""Time to first token of a prompt of schema modules: full prefill at its positions, and cached inference (Prompt Cache, 3.4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import DynamicCache

from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.lab.bench.coldfiles import ColdFolder
from cacheblend_rag.lab.bench.rounds import in_rounds
from cacheblend_rag.lab.bench.setting import NO_LIMIT, ModelSetting, check_least
from cacheblend_rag.lab.bench.shapes import make_model
from cacheblend_rag.lab.bench.words import RandomWords
from cacheblend_rag.pml import Import, Module, Param, Prompt, Schema, Text
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector

__all__ = ["PMLBench", "PMLRow", "PMLSetting"]

_FULL = "full"
_TIERS = ("ram", "disk")

_Run = tuple[float, BlendReport | None]


@dataclass(frozen=True, slots=True)
class PMLSetting(ModelSetting):
    """What is measured; what it shares with other benches is described at `ModelSetting`.

    Attributes
    ----------
    modules, module_tokens : int
        The schema: so many modules of so many tokens, all imported.
    new_tokens : int
        Tokens of the prompt that the schema does not have: the question, and the argument if there is one.
    argument_tokens : int
        How many of them are the argument of a parameter in the first module; 0 for a schema without parameters.
    selectors : tuple of str
        Selectors measured; "none" is Prompt Cache's own cached inference, which recomputes nothing.
    ratio : float
        The recompute ratio of the others.
    tier : str
        Where stored KV is read from: "ram", or "disk" with nothing in the page cache.
    folder : Path or None
        Where the disk tier's files are meanwhile; the system's folder for temporary files by default.
    """

    modules: int = 10
    module_tokens: int = 500
    new_tokens: int = 50
    argument_tokens: int = 10
    selectors: tuple[str, ...] = ("none",)
    ratio: float = 0.15
    tier: str = "ram"
    folder: Path | None = None

    def __post_init__(self) -> None:
        ModelSetting.__post_init__(self)
        check_least(self, 1, "modules", "module_tokens", "new_tokens")
        if not 0 <= self.argument_tokens < min(self.new_tokens, self.module_tokens):
            raise ConfigError(
                f"argument_tokens={self.argument_tokens} must be fewer than the {self.new_tokens} new tokens, and than the "
                f"{self.module_tokens} of a module"
            )
        if self.tier not in _TIERS:
            raise ConfigError(f"tier {self.tier!r} is unknown; give {' or '.join(_TIERS)}")


@dataclass(frozen=True, slots=True)
class PMLRow:
    """One method's figures.

    Attributes
    ----------
    method : str
        "full", the model's own forward over the whole prompt at its positions, or "cached".
    selector : str or None
        Which tokens were recomputed.
    charged_ratio : float
        Work done on module tokens over (module tokens x layers).
    ttft_s, ttft_min_s, ttft_max_s : float
        Median and extremes over the rounds, from the call to the first output id, laying out the prompt included.
    speedup : float
        Full prefill's `ttft_s` over this one.
    load_s : float or None
        Median of the time spent waiting for stored KV.
    load_bytes : int or None
        Bytes of KV that were loaded.
    """

    method: str
    selector: str | None
    charged_ratio: float
    ttft_s: float
    ttft_min_s: float
    ttft_max_s: float
    speedup: float
    load_s: float | None = None
    load_bytes: int | None = None


class PMLBench:
    """A model of random weights with a schema loaded; a context manager.

    Parameters
    ----------
    setting : PMLSetting
        What is measured.

    Raises
    ------
    ConfigError
        If the shape or a selector is unknown.
    PromptTooLongError
        If the prompt does not fit the shape's window.
    """

    def __init__(self, setting: PMLSetting) -> None:
        self.setting = setting
        for name in setting.selectors:
            make_selector(name)
        settings = setting.engine_settings(
            # From disk, nothing may be kept in RAM.
            ram_bytes=0 if setting.tier == "disk" else NO_LIMIT,
            selector="none",
            recompute_ratio=0.0,
        )
        model, tokenizer = make_model(setting)
        self._disk = ColdFolder(setting.folder) if setting.tier == "disk" else None
        location = None if self._disk is None else self._disk.path
        self.engine = BlendEngine(model, tokenizer, store=location, **settings)
        words = RandomWords(tokenizer, setting.seed)
        names = [f"module-{number}" for number in range(setting.modules)]
        schema = Schema(
            "bench",
            tuple(
                Module(name, self._children(words, has_parameter=bool(setting.argument_tokens and not number)))
                for number, name in enumerate(names)
            ),
        )
        argument = {"argument": words.text(setting.argument_tokens)} if setting.argument_tokens else {}
        imports = [Import(name, {} if number else argument) for number, name in enumerate(names)]
        question = Text(words.text(setting.new_tokens - setting.argument_tokens))
        self.prompt = Prompt(schema, (*imports, question))
        self.engine.load_schema(schema)
        self.layout = self.engine.prompt_layout(self.prompt)

    def _children(self, words: RandomWords, *, has_parameter: bool) -> tuple[Text | Param, ...]:
        count = self.setting.module_tokens
        if not has_parameter:
            return (Text(words.text(count)),)
        first = count // 2
        rest = count - first - self.setting.argument_tokens
        slot = Param("argument", self.setting.argument_tokens)
        return (Text(words.text(first)), slot, Text(words.text(rest))) if rest else (Text(words.text(first)), slot)

    def __enter__(self) -> PMLBench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        if self._disk is not None:
            self._disk.remove()

    def cached_share_after_drop(self) -> float | None:
        """Return which share of the disk tier's files is in memory once they were dropped; None without such files."""
        return None if self._disk is None else self._disk.cached_share_after_drop()

    def measure(self, progress: Callable[[int, int], None] | None = None) -> list[PMLRow]:
        """Run every method once unmeasured, then `repeats` rounds, each beginning with another method.

        Parameters
        ----------
        progress : callable, optional
            Called with the number of finished runs and of all.

        Returns
        -------
        list of PMLRow
            Full prefill, then a row for each selector.
        """
        methods = [_FULL, *dict.fromkeys(self.setting.selectors)]
        runs = in_rounds(methods, self._timed, self.setting.repeats, progress=progress)
        return [self._row(method, runs[method], runs[_FULL]) for method in methods]

    def _timed(self, method: str) -> _Run:
        if self._disk is not None:
            self._disk.drop_cached()
        started = time.perf_counter()
        report = self._full() if method == _FULL else self._cached(method)
        return time.perf_counter() - started, report

    @torch.no_grad()
    def _full(self) -> None:
        device = self.setting.device
        ids = torch.tensor([self.layout.token_ids], device=device)
        positions = torch.tensor([self.layout.positions], device=device)
        cache = DynamicCache(config=self.engine.model.config)
        logits = self.engine.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        int(logits[0, -1].argmax())

    def _cached(self, selector: str) -> BlendReport:
        ratio = 0.0 if selector == "none" else self.setting.ratio
        blend = self.engine.blend.replace(selector=selector, recompute_ratio=ratio)
        result = self.engine.prefill(self.prompt, blend=blend)
        int(result.logits.argmax())
        return result.report

    def _row(self, method: str, runs: Sequence[_Run], full: Sequence[_Run]) -> PMLRow:
        is_full = method == _FULL
        times = [seconds for seconds, _ in runs]
        reports = [report for _, report in runs if report is not None]
        return PMLRow(
            method=method if is_full else "cached",
            selector=None if is_full else method,
            charged_ratio=1.0 if is_full else median(report.charged_ratio for report in reports),
            ttft_s=median(times),
            ttft_min_s=min(times),
            ttft_max_s=max(times),
            speedup=median(seconds for seconds, _ in full) / median(times),
            load_s=median(report.load_s for report in reports) if reports else None,
            load_bytes=round(median(report.load_bytes for report in reports)) if reports else None,
        )
