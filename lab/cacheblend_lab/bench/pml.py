"""Time to first token of a prompt of schema modules: full prefill at its positions, and cached inference (Prompt Cache, 3.4)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from cacheblend_lab.bench.runner import RoundsBench, say_range
from cacheblend_lab.bench.settings import NO_LIMIT, PMLSetting
from cacheblend_lab.bench.shapes import RandomWords, make_model
from cacheblend_pml import Import, Module, Param, Prompt, Schema, Schemas, Text
from cacheblend_rag.cli.output import say_seconds
from cacheblend_rag.engine import BlendEngine
from cacheblend_rag.report import BlendReport
from cacheblend_rag.selection import make_selector

__all__ = ["PMLBench", "PMLRow"]

_FULL = "full"
_Run = tuple[float, "BlendReport | None"]


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


class PMLBench(RoundsBench[PMLSetting, str, _Run, PMLRow]):
    """A model of random weights with a schema loaded."""

    text_columns = 2

    def __init__(self, setting: PMLSetting) -> None:
        super().__init__(setting)
        for name in setting.selectors:
            make_selector(name)
        settings = setting.engine_settings(
            # From disk, nothing may be kept in RAM.
            ram_bytes=0 if setting.tier == "disk" else NO_LIMIT,
            selector="none",
            recompute_ratio=0.0,
        )
        model, tokenizer = make_model(setting)
        location = self.use_disk(setting.folder).path if setting.tier == "disk" else None
        self.engine = self.closing.enter_context(BlendEngine(model, tokenizer, store=location, **settings))
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
        self.prompt = Prompt(schema, (*imports, Text(words.text(setting.new_tokens - setting.argument_tokens))))
        self.schemas = Schemas(self.engine)
        self.schemas.load(schema)
        self.layout = self.engine.prompt_layout(self.schemas.prompt(self.prompt))

    def _children(self, words: RandomWords, *, has_parameter: bool) -> tuple[Text | Param, ...]:
        count = self.setting.module_tokens
        if not has_parameter:
            return (Text(words.text(count)),)
        first = count // 2
        rest = count - first - self.setting.argument_tokens
        slot = Param("argument", self.setting.argument_tokens)
        return (Text(words.text(first)), slot, Text(words.text(rest))) if rest else (Text(words.text(first)), slot)

    def methods(self) -> list[str]:
        """Return full prefill, then every selector."""
        return [_FULL, *dict.fromkeys(self.setting.selectors)]

    def run(self, method: str) -> _Run:
        """Return the seconds to the first output id, laying out the prompt included, and the engine's report."""
        if self.disk is not None:
            self.disk.drop_cached()
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
        result = self.engine.prefill(self.schemas.prompt(self.prompt), blend=blend)
        int(result.logits.argmax())
        return result.report

    def row(self, method: str, runs: Mapping[str, Sequence[_Run]]) -> PMLRow:
        """Return a method's figures beside those of full prefill."""
        is_full = method == _FULL
        times = [seconds for seconds, _ in runs[method]]
        reports = [report for _, report in runs[method] if report is not None]
        return PMLRow(
            method=method if is_full else "cached",
            selector=None if is_full else method,
            charged_ratio=1.0 if is_full else median(report.charged_ratio for report in reports),
            ttft_s=median(times),
            ttft_min_s=min(times),
            ttft_max_s=max(times),
            speedup=median(seconds for seconds, _ in runs[_FULL]) / median(times),
            load_s=median(report.load_s for report in reports) if reports else None,
            load_bytes=round(median(report.load_bytes for report in reports)) if reports else None,
        )

    def title(self, rows: Sequence[PMLRow]) -> str:
        asked = self.setting
        return (
            f"{asked.label}, from {asked.tier}: {asked.modules} modules of {asked.module_tokens} "
            f"tokens and {asked.new_tokens} new tokens, median of {asked.repeats}"
        )

    def cells(self, row: PMLRow) -> dict[str, Any]:
        return {
            "method": row.method,
            "selector": row.selector,
            "charged": f"{row.charged_ratio:.3f}",
            "first token": say_seconds(row.ttft_s),
            "range": say_range(row.ttft_min_s, row.ttft_max_s),
            "speedup": f"{row.speedup:.1f}x",
            "waited": None if row.load_s is None else say_seconds(row.load_s),
        }

    def shared(self) -> dict[str, Any]:
        return super().shared() | {"tier": self.setting.tier, "prompt_tokens": len(self.layout)}

    def facts(self) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self.layout),
            "cached_tokens": self.layout.context_tokens,
            "cached_share_after_drop": self.cached_share_after_drop(),
        }
