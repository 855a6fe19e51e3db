"""A server that is used hard: many clients who leave early, documents that change, budgets that are too small.

Each client owns some documents, adds, replaces and deletes them, and asks about them. Every answer must be the one that was given
when nobody else asked and the document was as it is at that moment; a document that was deleted is not known any more. In between
the server is stopped and started again, and later killed.
"""

import asyncio
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from cacheblend_lab.reference import load_tokenizer
from integrations.serve.tests.process import ServerProcess
from tests.families import tiny_reader, words

DOCUMENTS_OF_A_CLIENT, VERSIONS, TOKENS = 2, 3, 6
# What there must be some of.
DEEDS = ("right", "puts", "deletes", "left early", "not there")


def chunks_of(document: int, version: int) -> dict[str, list[str]]:
    """Return the chunks of a version; the first one is that of all versions."""
    seeds = ((16, document * 100), (20, document * 100 + 10 * version + 1), (14, document * 100 + 50))
    return {"chunks": [words(count, seed) for count, seed in seeds]}


def body_of(document: int) -> dict[str, object]:
    asked = {"prompt": f"Question: {words(5, document + 7)}", "documents": [f"d{document}"]}
    return {**asked, "temperature": 0, "max_tokens": TOKENS, "recompute_ratio": 0}


def answers_alone(url: str, documents: int) -> dict[tuple[int, int], str]:
    """Return what a server answers that is asked for nothing else, by document and version; no document is left there."""
    found = {}
    with httpx.Client(base_url=url, timeout=120) as http:
        for document in range(documents):
            for version in range(VERSIONS):
                http.put(f"/v1/documents/d{document}", json=chunks_of(document, version)).raise_for_status()
                reply = http.post("/v1/completions", json=body_of(document)).raise_for_status()
                found[document, version] = reply.json()["choices"][0]["text"]
            http.delete(f"/v1/documents/d{document}").raise_for_status()
    return found


@dataclass
class Outcome:
    """What came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    flaws: list[str] = field(default_factory=list)


class Client:
    """Somebody who owns documents and knows which version of each is there."""

    def __init__(self, number: int, alone: dict[tuple[int, int], str], outcome: Outcome) -> None:
        self._rng = random.Random(number)
        first = number * DOCUMENTS_OF_A_CLIENT
        # None is a document that is not there; after a failure it may be one of two.
        self._there: dict[int, set[int | None]] = {first + each: {None} for each in range(DOCUMENTS_OF_A_CLIENT)}
        self._alone = alone
        self._outcome = outcome

    async def work(self, server: ServerProcess) -> None:
        """Work for ever."""
        while True:
            document, chance = self._rng.choice(list(self._there)), self._rng.random()
            try:
                async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
                    if chance < 0.2:
                        await self._change(http, document, self._rng.randrange(VERSIONS))
                    elif chance < 0.28:
                        await self._change(http, document, None)
                    elif chance < 0.42:
                        async with http.stream(
                            "POST", "/v1/completions", json=body_of(document) | {"stream": True}
                        ) as r:
                            async for _ in r.aiter_lines():
                                break
                        self._outcome.counts["left early"] += 1
                    else:
                        await self._ask(http, document)
            except httpx.TransportError:
                self._outcome.counts["cut off"] += 1
                await asyncio.sleep(0.2)

    async def _change(self, http: httpx.AsyncClient, document: int, version: int | None) -> None:
        """Bring a document to a version, or delete it."""
        before, self._there[document] = self._there[document], self._there[document] | {version}
        url = f"/v1/documents/d{document}"
        if version is None:
            reply = await http.delete(url)
        else:
            reply = await http.put(url, json=chunks_of(document, version))
        if self._is_refused(reply):
            # Nothing of a request that is not let in is done.
            self._there[document] = before
        elif reply.status_code == 200 or (reply.status_code == 404 and version is None and None in before):
            self._there[document] = {version}
            self._outcome.counts["deletes" if version is None else "puts"] += 1
        else:
            self._flaw(f"d{document}, which was {before}, to {version}: {reply.status_code} {reply.text:.200}")

    async def _ask(self, http: httpx.AsyncClient, document: int) -> None:
        reply = await http.post("/v1/completions", json=body_of(document))
        there = self._there[document]
        if self._is_refused(reply):
            return
        if reply.status_code == 404 and None in there:
            self._there[document] = {None}
            self._outcome.counts["not there"] += 1
        elif reply.status_code != 200:
            self._flaw(f"asked about d{document}, which was {there}: {reply.status_code} {reply.text:.200}")
        else:
            text = reply.json()["choices"][0]["text"]
            could_be = {each for each in there if each is not None and self._alone[document, each] == text}
            if could_be:
                self._there[document] = could_be
                self._outcome.counts["right"] += 1
            else:
                stale = [each for each in range(VERSIONS) if self._alone[document, each] == text]
                self._flaw(f"d{document} is {there}, and the answer is that of {stale or 'none'}: {text!r}")

    def _is_refused(self, reply: httpx.Response) -> bool:
        if reply.status_code == 503 and "was not finished" in reply.text:
            # The server was stopped, and waited no longer: what was asked for may have been done, or not.
            raise httpx.RemoteProtocolError("cut off by a server that stops")
        refused = reply.status_code in (429, 503) and "Retry-After" in reply.headers
        self._outcome.counts["to come again"] += refused
        return refused

    def _flaw(self, what: str) -> None:
        self._outcome.flaws.append(what)


@contextmanager
def model_folder() -> Iterator[Path]:
    """A tiny random model in a folder."""
    with tempfile.TemporaryDirectory() as name:
        # Whatever it writes, it writes to the end.
        model, tokenizer = tiny_reader(eos_token_id=None), load_tokenizer()
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        yield Path(name)


def run(seconds: float, clients: int) -> Outcome:
    """Use a server for so long; returns what came of it."""
    outcome = Outcome()
    with model_folder() as folder, tempfile.TemporaryDirectory() as name:
        config = Path(name) / "config.yaml"
        # What was rounded on disk would be another answer where two tokens are nearly as likely.
        budget = {"ram_bytes": 300_000, "disk_bytes": 4_000_000, "disk_codec": "native", "dtype": "float32"}
        config.write_text(json.dumps(budget | {"separator": "\n\n"}), encoding="utf-8")
        options = ["--model", str(folder), "--store", str(Path(name) / "kv"), "--config", str(config)]
        server = ServerProcess(Path(name) / "log", *options)
        server.start()
        try:
            alone = answers_alone(server.url, clients * DOCUMENTS_OF_A_CLIENT)
            # Else an answer of yesterday's document could not be told.
            assert len(set(alone.values())) > 0.9 * len(alone)
            everybody = [Client(number, alone, outcome) for number in range(clients)]
            for ending in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
                if server.process.poll() is not None:
                    server.start()
                asyncio.run(_part(server, everybody, seconds / 3, ending, outcome))
        finally:
            if server.process.poll() is None:
                server.process.kill()
    return outcome


async def _part(
    server: ServerProcess, everybody: list[Client], seconds: float, ending: signal.Signals, outcome: Outcome
) -> None:
    """Let everybody work, on a slow machine until there was something of all, and end the server in the midst of it."""
    working = [asyncio.create_task(client.work(server)) for client in everybody]
    await asyncio.sleep(seconds)
    until = time.monotonic() + 120
    while not all(outcome.counts[deed] for deed in DEEDS) and time.monotonic() < until:
        await asyncio.sleep(0.2)
    await asyncio.to_thread(server.stop, ending)
    for task in working:
        task.cancel()
    results = await asyncio.gather(*working, return_exceptions=True)
    outcome.flaws += [repr(each) for each in results if isinstance(each, Exception)]
