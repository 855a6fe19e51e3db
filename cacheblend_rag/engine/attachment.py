"""What is optional on a running forward: attachments from above the engine, and its own repair, eviction and source attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from cacheblend_rag.engine.generation import GenerationResult
from cacheblend_rag.engine.request import Order, PromptRun
from cacheblend_rag.engine.watch import SourceAttention
from cacheblend_rag.fuse import BlendCache, Repair, Steering
from cacheblend_rag.model import Decoder
from cacheblend_rag.selection import make_selector
from cacheblend_rag.selection.question import look_layers
from cacheblend_rag.snapkv import Eviction
from cacheblend_rag.store import KVReader
from cacheblend_rag.tuning import Tuning

__all__ = ["Attachment", "alone_reason", "attach"]


class Attachment:
    """What `BlendEngine.attach` attaches to an engine: it takes part in the requests that come from then on.

    A subclass overrides what it needs; by default each method does nothing. It registers its own figures with those of the engine
    (`EngineMetrics.registry`). Requests are shown to it by the threads that compute them.
    """

    leave: Callable[[], None] | None = None
    """What detaches it; None before it is attached, which it is once."""

    def attached(self, engine: Any) -> None:
        """Begin to serve an engine, a `BlendEngine`."""

    def order(self) -> Order | None:
        """Return settings for requests that bring none; None leaves the engine's. Of several attachments the last is followed."""
        return None

    def choose(self, run: PromptRun, readers: Sequence[KVReader] | None) -> tuple[float, str | None] | None:
        """Return the ratio of a prompt whose call sets none, and why it is to be prefilled in full instead, if it is.

        It is asked before the KV of the prompt's chunks is opened, when `readers` is None and only the latter counts, and again
        with readers of what is stored. None leaves the settings' ratio; of several attachments the last is followed.
        """
        return None

    def around(self, run: PromptRun, cache: BlendCache, headroom: int) -> AbstractContextManager[object]:
        """Return what is entered around the forward over a prompt, and its decoding where up to `headroom` tokens follow at once.

        The cache is empty then. It is asked anew if stored KV turns out damaged, and may keep in ``run.notes`` what it needs when
        the prompt is answered.
        """
        return nullcontext()

    def alone_reason(self, run: PromptRun) -> str | None:
        """Return why the answer to a prompt cannot be decoded together with others, or None."""
        return None

    def answered(self, run: PromptRun, result: GenerationResult) -> None:
        """Take note of an answer that came to its end."""

    def for_tenant(self) -> Attachment | None:
        """Return what is attached to an engine of another tenant that is made of this one's; None for nothing."""
        return None

    def close(self) -> None:
        """Detach it, as the engine does when it is closed; a second time nothing happens."""
        if self.leave is not None:
            with suppress(ValueError):
                self.leave()


def attach(
    run: PromptRun,
    attachments: Sequence[Attachment],
    decoder: Decoder,
    cache: BlendCache,
    steering: Steering | None,
    tuning: Tuning,
    headroom: int,
    room: int,
) -> Iterator[AbstractContextManager[object]]:
    """Yield what is to be entered around a prompt's forward; each notes in the run what came of it, if the forward succeeds.

    It takes the empty cache of the prompt, and what blends the prefill, None where that is in full. At most `headroom` tokens
    will be generated, and for `room` each layer is given room at once.
    """
    blend = run.request.blend
    for each in (*attachments,):
        yield each.around(run, cache, headroom)
    if steering is not None and make_selector(blend.selector).repair:
        yield _repairing(run, decoder, cache, steering)
    if blend.kv_capacity is not None:
        yield _evicting(run, decoder, cache, tuning, headroom, room)
    elif blend.source_attention:
        sources = SourceAttention(decoder.model, look_layers(None, decoder.num_layers), len(run.prompt.layout))
        run.attention = sources.of
        yield sources(cache)


def alone_reason(run: PromptRun, attachments: Sequence[Attachment]) -> str | None:
    """Return why the answer to a prompt cannot be decoded together with others, as what watches it says, or None."""
    blend = run.request.blend
    if make_selector(blend.selector).repair:
        return "decode-time repair watches one answer at a time"
    if blend.source_attention:
        return "source_attention watches one answer at a time"
    if blend.kv_capacity is not None:
        return f"eviction after prefill (kv_capacity={blend.kv_capacity}) keeps other tokens of each prompt"
    return next(filter(None, (each.alone_reason(run) for each in (*attachments,))), None)


@contextmanager
def _repairing(run: PromptRun, decoder: Decoder, cache: BlendCache, steering: Steering) -> Iterator[None]:
    repair = Repair(decoder, cache, run.layout, steering, make_selector(run.request.blend.selector))
    with repair():
        yield
    run.charge += repair.charge
    run.figures["repaired_tokens"] = repair.repaired_rows


@contextmanager
def _evicting(
    run: PromptRun, decoder: Decoder, cache: BlendCache, tuning: Tuning, headroom: int, room: int
) -> Iterator[None]:
    assert run.plan is not None and run.request.blend.kv_capacity is not None
    selection = run.plan.selection
    eviction = Eviction(
        decoder.model,
        run.request.blend.kv_capacity,
        tuning,
        cache,
        len(run.prompt.layout),
        run.prompt.context,
        headroom,
        room,
        # A selection that looks at the first layers comes back to them.
        at_end=selection is not None and bool(selection.look_layers),
    )
    with eviction():
        yield
    run.figures["kept_reason"] = eviction.kept_reason
