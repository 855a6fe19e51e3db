"""A server under load: Poisson arrivals of prompts whose chunks are drawn by Zipf's law (CacheBlend, Figure 14).

It is asked over HTTP, as OpenAI's clients ask, so that any server can be measured: with the texts in the prompt, or, one of this
package, with the names of documents that it was given before.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import quantiles
from typing import Any

import httpx

from cacheblend_lab.bench.runner import Bench, Say, say_nothing
from cacheblend_lab.bench.settings import ServeSetting
from cacheblend_lab.cluster.asking import chunk_id, store_texts
from cacheblend_lab.training.fillers import notes
from cacheblend_rag.chunk import BLANK_LINE
from cacheblend_rag.cli.output import say_seconds
from cacheblend_rag.errors import ConfigError

__all__ = ["Arrival", "ServeBench", "ServeRow", "arrivals", "zipf_sample"]

_CHUNKS_OF_A_DOCUMENT = 5
_UNLOADED = 12
# Before all others, not counted: kernels are compiled, and what is asked for most comes into the RAM of the server. This is given
# no more than a minute, since models that take longer gain little.
_WARM_UP = 100
_WARM_UP_S = 60.0
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to be: when it is sent, in seconds, and the chunks of its prompt, in order."""

    at_s: float
    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Reply:
    """Outcome of a request; `ttft_s` is None if it failed."""

    ttft_s: float | None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ServeRow:
    """Figures of the server at one rate.

    Attributes
    ----------
    rate : float or None
        Requests per second on average; None for one after the other.
    requests, failed : int
        How many were sent, and how many of them had no answer.
    prompt_tokens : float
        Of a prompt, on average, as the server counts.
    ttft_p50_s, ttft_p90_s, ttft_p99_s : float
        Time to the first token, from sending the request.
    tpot_p50_s, tpot_p90_s : float
        Time per further token.
    output_rate : float
        Tokens of answers per second, from the first request to the end of the last answer.
    goodput : float
        Share of the requests whose first token came within twice the unloaded median.
    """

    rate: float | None
    requests: int
    failed: int
    prompt_tokens: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    output_rate: float
    goodput: float


def zipf_sample(rng: random.Random, size: int, count: int, exponent: float) -> tuple[int, ...]:
    """Draw different numbers below `size`; the n-th, counted from 1, is as likely as ``1 / n ** exponent``."""
    weights = list(accumulate((number + 1) ** -exponent for number in range(size)))
    drawn: dict[int, None] = {}
    while len(drawn) < count:
        drawn[rng.choices(range(size), cum_weights=weights)[0]] = None
    return tuple(drawn)


def arrivals(setting: ServeSetting, rate: float | None, count: int = _UNLOADED) -> list[Arrival]:
    """Return what arrives at a rate in the setting's time, at least one request; always the same.

    At None it is `count` requests, to be sent one after the other.
    """
    rng = random.Random(f"{setting.seed}:{rate}")
    # The likeliest chunks are of different documents.
    places = random.Random(setting.seed).sample(range(setting.corpus), setting.corpus)
    found: list[Arrival] = []
    at_s = 0.0
    while not found or (len(found) < count if rate is None else at_s < setting.seconds):
        drawn = zipf_sample(rng, setting.corpus, setting.chunks, setting.zipf)
        found.append(Arrival(at_s, tuple(places[number] for number in drawn)))
        at_s += 0.0 if rate is None else rng.expovariate(rate)
    return found


class ServeBench(Bench[ServeSetting, ServeRow]):
    """Asks a server at rising rates."""

    text_columns = 0

    def __init__(self, setting: ServeSetting) -> None:
        super().__init__(setting)
        # As OpenAI's own client finds it; a setting is written into the file of figures.
        key = os.environ.get("OPENAI_API_KEY")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._chunks = notes(random.Random(f"texts:{setting.seed}"), setting.corpus, setting.chunk_words)
        with self._client() as client:
            self._model = setting.model or self._named(client)
            if setting.prompts == "documents":
                store_texts(client, self._chunks, _CHUNKS_OF_A_DOCUMENT)

    def measure(self, say: Say = say_nothing) -> list[ServeRow]:
        """Return the row of requests one after the other, then one for each rate."""
        rows: list[ServeRow] = []
        say("warming up")
        # Not the prompts that are measured, which a server may keep whole.
        asyncio.run(self._one_by_one(arrivals(self.setting, None, _UNLOADED + _WARM_UP)[_UNLOADED:], _WARM_UP_S))
        for rate in (None, *self.setting.rates):
            say("asking one after the other" if rate is None else f"asking {rate:g} times a second")
            sent = arrivals(self.setting, rate)
            began = time.perf_counter()
            replies = asyncio.run(self._one_by_one(sent) if rate is None else self._at_their_times(sent))
            took = time.perf_counter() - began
            limit = 2 * rows[0].ttft_p50_s if rows else float("inf")
            rows.append(_row(rate, replies, took, limit))
        return rows

    def title(self, rows: Sequence[ServeRow]) -> str:
        setting = self.setting
        return (
            f"{self._model} at {setting.url}: {setting.chunks} chunks of {setting.chunk_words} words from {setting.corpus}, as "
            f"{setting.prompts}, {rows[0].prompt_tokens:,.0f} tokens; answers of {setting.output_tokens}"
        )

    def cells(self, row: ServeRow) -> dict[str, Any]:
        return {
            "a second": "one by one" if row.rate is None else f"{row.rate:g}",
            "requests": row.requests,
            "failed": row.failed,
            "TTFT p50": say_seconds(row.ttft_p50_s),
            "p90": say_seconds(row.ttft_p90_s),
            "p99": say_seconds(row.ttft_p99_s),
            "TPOT p50": say_seconds(row.tpot_p50_s),
            "TPOT p90": say_seconds(row.tpot_p90_s),
            "tokens a second": f"{row.output_rate:.1f}",
            "in time": f"{row.goodput:.0%}",
        }

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.setting.url, headers=self._headers, timeout=_TIMEOUT_S)

    def _async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.setting.url, headers=self._headers, timeout=_TIMEOUT_S, limits=limits)

    def _named(self, client: httpx.Client) -> str:
        try:
            reply = client.get("/v1/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{self.setting.url} does not say which model it has ({type(error).__name__}: {error}); give the address of an "
                "OpenAI-compatible server without /v1, and a key if it wants one"
            ) from error

    async def _one_by_one(self, sent: Sequence[Arrival], seconds: float = math.inf) -> list[_Reply]:
        """Send each when the one before it is answered, and none once `seconds` have passed."""
        until = time.perf_counter() + seconds
        async with self._async_client() as client:
            return [await self._ask(client, each) for each in sent if time.perf_counter() < until]

    async def _at_their_times(self, sent: Sequence[Arrival]) -> list[_Reply]:
        async with self._async_client() as client:
            began = time.perf_counter()

            async def later(arrival: Arrival) -> _Reply:
                await asyncio.sleep(max(0.0, began + arrival.at_s - time.perf_counter()))
                return await self._ask(client, arrival)

            return await asyncio.gather(*(later(each) for each in sent))

    async def _ask(self, client: httpx.AsyncClient, arrival: Arrival) -> _Reply:
        body = self._body(arrival)
        began, first, last, usage = time.perf_counter(), 0.0, 0.0, dict[str, int]()
        try:
            async with client.stream("POST", "/v1/completions", json=body) as reply:
                reply.raise_for_status()
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == line or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if event.get("choices"):
                        last = time.perf_counter()
                        first = first or last
                    usage = event.get("usage") or usage
        except (httpx.HTTPError, ValueError):
            return _Reply(None)
        written = usage.get("completion_tokens", 0)
        tpot_s = (last - first) / (written - 1) if written > 1 else None
        return _Reply(first - began if first else None, tpot_s, usage.get("prompt_tokens", 0), written)

    def _body(self, arrival: Arrival) -> dict[str, Any]:
        setting = self.setting
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": f"Question {sum(arrival.chunks)}: what happens on {' '.join(map(str, arrival.chunks[:3]))}?\nAnswer:",
            "max_tokens": setting.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if setting.prompts == "documents":
            body["documents"] = [{"id": chunk_id(number)} for number in arrival.chunks]
        else:
            texts = [self._chunks[number] for number in arrival.chunks]
            body["prompt"] = BLANK_LINE.join([*texts, body["prompt"]])
        return body


def _row(rate: float | None, replies: Sequence[_Reply], took_s: float, limit_s: float) -> ServeRow:
    first = sorted(each.ttft_s for each in replies if each.ttft_s is not None)
    further = sorted(each.tpot_s for each in replies if each.tpot_s is not None)
    whole = [each for each in replies if each.ttft_s is not None]
    return ServeRow(
        rate=rate,
        requests=len(replies),
        failed=len(replies) - len(whole),
        prompt_tokens=sum(each.prompt_tokens for each in whole) / max(1, len(whole)),
        ttft_p50_s=_share(first, 50),
        ttft_p90_s=_share(first, 90),
        ttft_p99_s=_share(first, 99),
        tpot_p50_s=_share(further, 50),
        tpot_p90_s=_share(further, 90),
        output_rate=sum(each.output_tokens for each in whole) / took_s,
        goodput=sum(each <= limit_s for each in first) / len(replies),
    )


def _share(times: Sequence[float], part: int) -> float:
    """Return a percentile; NaN of nothing."""
    if len(times) < 2:
        return times[0] if times else float("nan")
    return quantiles(times, n=100, method="inclusive")[part - 1]
