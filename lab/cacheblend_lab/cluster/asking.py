"""Asks real servers what the simulator's requests ask, and counts where their chunks came from."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import httpx
import numpy as np

from cacheblend_lab.cluster.costs import Reads
from cacheblend_lab.cluster.router import Router, homes_of
from cacheblend_lab.cluster.workload import Workload
from cacheblend_lab.training.fillers import notes
from cacheblend_rag.errors import CacheBlendError, ConfigError

__all__ = ["Answered", "Asker", "chunk_id", "store_corpus", "store_texts"]

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer.

    Attributes
    ----------
    ended_at : float
        When it was there, in seconds from the first request on.
    reads : Reads
        Where its chunks were.
    context_tokens, computed_tokens, output_tokens : int
        Tokens of its chunks, what else its prompt has, and of the answer.
    batch_size : int
        Prompts that were answered together with it, itself included.
    """

    ended_at: float
    reads: Reads
    context_tokens: int
    computed_tokens: int
    output_tokens: int
    batch_size: int


def store_corpus(urls: Sequence[str], workload: Workload, words: int) -> None:
    """Have the servers store a corpus of chunks of `words` words, one after the other: the first computes it."""
    texts = notes(random.Random("cluster"), workload.corpus_chunks, words)
    for url in urls:
        with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
            store_texts(client, texts, workload.chunks_per_document)


def store_texts(client: httpx.Client, texts: Sequence[str], chunks_per_document: int) -> None:
    """Have a server store texts as the chunks of documents, by the names that `chunk_id` gives them."""
    for first in range(0, len(texts), chunks_per_document):
        part = texts[first : first + chunks_per_document]
        starts = accumulate((len(text) + 1 for text in part[:-1]), initial=0)
        chunks = [
            {"id": chunk_id(first + place), "text": text, "document": f"bench-document-{first}", "start": start}
            for place, (text, start) in enumerate(zip(part, starts, strict=True))
        ]
        reply = client.post("/v1/chunks", json={"chunks": chunks})
        if reply.is_error:
            raise ConfigError(
                f"{client.base_url} did not store the corpus: {reply.text:.300}; only a server of this package does, and "
                "`bench serve --prompts text` asks others"
            )


def chunk_id(number: int) -> str:
    """Return the name of a chunk of the corpus."""
    return f"bench-chunk-{number}"


class Asker:
    """Asks servers, each client one request after the other."""

    def __init__(self, urls: Sequence[str], output_tokens: int, question_words: int) -> None:
        self._urls = list(urls)
        self._output_tokens = output_tokens
        self._question_words = question_words
        reply = httpx.get(f"{self._urls[0]}/v1/models", timeout=_TIMEOUT_S)
        self._model = reply.raise_for_status().json()["data"][0]["id"]

    def ask_workload(
        self, workload: Workload, requests: int, clients: int, router: str, queue_bound: int, seed: int = 0
    ) -> list[Answered]:
        """Ask a workload's requests, routed as the simulator routes them."""
        rng = np.random.default_rng(seed)
        asked = workload.draw(rng, requests)
        homes = homes_of(asked.chunk_documents, len(self._urls)).tolist()
        choose = Router(router, len(self._urls), queue_bound, rng)
        return asyncio.run(self._ask_all(asked.chunks.tolist(), homes, clients, choose))

    def ask(self, chunks: Sequence[Sequence[int]], clients: int) -> list[Answered]:
        """Ask about chunks by number, a request each, the less busy of two servers at random."""
        choose = Router("random", len(self._urls), 0, np.random.default_rng(0))
        return asyncio.run(self._ask_all(chunks, [[0]] * len(chunks), clients, choose))

    async def _ask_all(
        self, chunks: Sequence[Sequence[int]], homes: Sequence[Sequence[int]], clients: int, router: Router
    ) -> list[Answered]:
        queues = [0] * len(self._urls)
        answered: list[Answered] = []
        numbers = iter(range(len(chunks)))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
            began = time.perf_counter()

            async def one_after_the_other() -> None:
                for number in numbers:
                    where = router.choose(homes[number], queues)
                    queues[where] += 1
                    report = await self._report(client, self._urls[where], chunks[number])
                    queues[where] -= 1
                    answered.append(_answered(time.perf_counter() - began, report))

            await asyncio.gather(*(one_after_the_other() for _ in range(clients)))
        return answered

    async def _report(self, client: httpx.AsyncClient, url: str, chunks: Sequence[int]) -> dict[str, Any]:
        words = (f"what happens on {number}" for number in range(self._question_words))
        question = " ".join(" ".join(words).split()[: self._question_words])
        body = {
            "model": self._model,
            "prompt": f"Question {sum(chunks)}: {question}?\nAnswer:",
            "documents": [{"id": chunk_id(number)} for number in chunks],
            "max_tokens": self._output_tokens,
            "temperature": 0,
            "report": True,
        }
        reply = await client.post(f"{url}/v1/completions", json=body)
        if reply.is_error:
            raise CacheBlendError(f"{url} did not answer: {reply.text:.300}")
        # One for each prompt of the request.
        found: dict[str, Any] = reply.json()["blend"][0]
        return found


def _answered(ended_at: float, report: dict[str, Any]) -> Answered:
    tiers = [chunk["tier"] for chunk in report["chunks"]]
    counts = {tier: tiers.count(tier) for tier in ("ram", "disk")}
    missing = report["misses"]
    far = len(tiers) - sum(counts.values()) - missing
    return Answered(
        ended_at,
        Reads(counts["ram"], counts["disk"], far, missing),
        report["context_tokens"],
        report["prompt_tokens"] - report["context_tokens"],
        report["output_tokens"],
        report["batch_size"],
    )
