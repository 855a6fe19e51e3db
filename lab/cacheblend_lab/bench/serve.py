"""A server under load: Poisson arrivals of prompts whose chunks are drawn by Zipf's law (CacheBlend, Figure 14).

It is asked over HTTP, as OpenAI's clients ask, so that any server can be measured: with the texts in the prompt, or, one of this
project, with the names of chunks that it was given before.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import httpx

from cacheblend_lab.bench.runner import Figures, Row, Say, percentile
from cacheblend_lab.cli.options import parse_numbers
from cacheblend_rag.errors import ConfigError

__all__ = ["measure", "prompts_of"]

# Asked one after the other, the first for warming up: kernels are compiled, and what is asked for most comes into RAM.
_WARM_UP, _UNLOADED = 30, 12
_TIMEOUT_S = 120.0
# Until a server that is started answers, and until it has ended.
_START_S, _STOP_S = 300.0, 30.0


class _Reply(NamedTuple):
    """What came of a request; without a first token it failed."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0


def measure(*, start: str, url: str, say: Say, **options: Any) -> Figures:
    """Return the figures of requests one after the other, then at each rate; `start` may start the server."""
    with _started(start, url, say):
        return _measured(url=url, say=say, **options)


@contextmanager
def _started(command: str, url: str, say: Say) -> Iterator[None]:
    """Have a shell start a server and wait until it answers, if there is a command; it ends with the block."""
    if not command:
        yield
        return
    say(f"starting {command}")
    # Its output goes where messages go; the table is printed alone.
    server = subprocess.Popen(f"exec {command}", shell=True, stdout=2)
    until = time.monotonic() + _START_S
    try:
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/v1/models", timeout=_TIMEOUT_S).is_success:
                    break
            if server.poll() is not None or time.monotonic() > until:
                raise ConfigError(f"no server answers at {url} that was started by {command}; what it printed says why")
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        try:
            server.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _measured(
    *,
    url: str,
    prompts: str,
    rates: str,
    seconds: float,
    corpus: int,
    chunks: int,
    chunk_words: int,
    zipf: float,
    output_tokens: int,
    say: Say,
) -> Figures:
    asked = parse_numbers(rates)
    if prompts not in ("documents", "text") or chunks > corpus or min(asked) <= 0:
        raise ConfigError(
            f"prompts={prompts!r} must be documents or text, chunks={chunks} at most corpus={corpus}, and rates={rates} above 0"
        )
    chance = random.Random(0)
    texts = [_text(chance, chunk_words) for _ in range(corpus)]
    # As OpenAI's own client finds it.
    key = os.environ.get("OPENAI_API_KEY")
    client: dict[str, Any] = {"base_url": url, "timeout": _TIMEOUT_S}
    client["headers"] = {} if key is None else {"Authorization": f"Bearer {key}"}
    say("handing the corpus over")
    body: Row = {"max_tokens": output_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {
        "model": _prepare(client, texts if prompts == "documents" else ()),
        "stream_options": {"include_usage": True},
    }

    def bodies(numbers: Iterator[tuple[int, ...]], count: int) -> list[Row]:
        return [body | _prompt(next(numbers), texts, prompts) for _ in range(count)]

    drawn = prompts_of(chance, corpus, chunks, zipf)
    say("warming up")
    asyncio.run(_ask_all(client, bodies(drawn, _WARM_UP), None))
    rows: list[Row] = []
    for rate in (None, *asked):
        say("asking one after the other" if rate is None else f"asking {rate:g} times a second")
        count = _UNLOADED if rate is None else max(1, round(rate * seconds))
        gaps = None if rate is None else [chance.expovariate(rate) for _ in range(count)]
        began = time.perf_counter()
        replies = asyncio.run(_ask_all(client, bodies(drawn, count), gaps))
        took_s = time.perf_counter() - began
        rows.append(_row(rate, replies, took_s, 2 * rows[0]["ttft_p50_s"] if rows else float("inf")))
    title = f"{body['model']} at {url}: {chunks} chunks of {chunk_words} words from {corpus}, as {prompts}"
    return Figures(title, rows, {"model": body["model"]})


def prompts_of(chance: random.Random, corpus: int, count: int, exponent: float) -> Iterator[tuple[int, ...]]:
    """Yield the different chunks of each prompt; the n-th likeliest, counted from 1, is as likely as ``1 / n ** exponent``."""
    # The likeliest chunks are not neighbours.
    places = chance.sample(range(corpus), corpus)
    weights = [(number + 1) ** -exponent for number in range(corpus)]
    while True:
        drawn: dict[int, None] = {}
        while len(drawn) < count:
            drawn[chance.choices(places, weights)[0]] = None
        yield tuple(drawn)


def _text(chance: random.Random, words: int) -> str:
    syllables = ("ba", "den", "fo", "gri", "hal", "ju", "kem", "lo", "mi", "nor", "pa", "ris", "su", "tel", "vo", "wen")
    return " ".join("".join(chance.choices(syllables, k=chance.randint(1, 3))) for _ in range(words))


def _prompt(numbers: tuple[int, ...], texts: Sequence[str], prompts: str) -> Row:
    question = f"Question {sum(numbers)}: what happens on {' '.join(map(str, numbers[:3]))}?\nAnswer:"
    if prompts == "documents":
        return {"prompt": question, "documents": [{"id": f"bench-{number}"} for number in numbers]}
    return {"prompt": "\n\n".join([*(texts[number] for number in numbers), question])}


def _prepare(client: dict[str, Any], texts: Sequence[str]) -> str:
    """Hand texts over as chunks; return the server's model."""
    given = [{"id": f"bench-{number}", "text": text} for number, text in enumerate(texts)]
    with httpx.Client(**client | {"timeout": None}) as asking:
        try:
            models = asking.get("/v1/models").raise_for_status().json()
            for first in range(0, len(given), 20):
                asking.post("/v1/chunks", json={"chunks": given[first : first + 20]}).raise_for_status()
            return str(models["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{client['base_url']} does not say which model it has, or takes no chunks ({error}); give the address of an "
                "OpenAI-compatible server without /v1, a key if it wants one, and --prompts text for one of others"
            ) from error


async def _ask_all(client: dict[str, Any], bodies: Sequence[Row], gaps: Sequence[float] | None) -> list[_Reply]:
    """Send requests with gaps between them, or each when the one before it is answered."""
    async with httpx.AsyncClient(**client, limits=httpx.Limits(max_connections=None)) as asking:
        if gaps is None:
            return [await _ask(asking, body) for body in bodies]
        sent = []
        for body, gap in zip(bodies, gaps, strict=True):
            sent.append(asyncio.create_task(_ask(asking, body)))
            await asyncio.sleep(gap)
        return await asyncio.gather(*sent)


async def _ask(client: httpx.AsyncClient, body: Row) -> _Reply:
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
        return _Reply()
    written = usage.get("completion_tokens", 0)
    tpot_s = (last - first) / (written - 1) if written > 1 else None
    return _Reply(first - began if first else None, tpot_s, usage.get("prompt_tokens", 0), written)


def _row(rate: float | None, replies: Sequence[_Reply], took_s: float, limit_s: float) -> Row:
    first = [each.ttft_s for each in replies if each.ttft_s is not None]
    further = [each.tpot_s for each in replies if each.tpot_s is not None]
    if not first:
        raise ConfigError("the server answered none of the requests")
    return {
        "rate": "one by one" if rate is None else f"{rate:g}",
        "requests": len(replies),
        "failed": len(replies) - len(first),
        "prompt_tokens": sum(each.prompt_tokens for each in replies) / len(first),
        **{f"ttft_p{share}_s": percentile(first, share) for share in (50, 90, 99)},
        **{f"tpot_p{share}_s": percentile(further, share) if further else None for share in (50, 90)},
        "tokens_per_s": sum(each.output_tokens for each in replies) / took_s,
        # Of those whose first token came within twice the unloaded median.
        "goodput": sum(each <= limit_s for each in first) / len(replies),
    }
