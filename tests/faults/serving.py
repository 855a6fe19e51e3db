"""A server that is used hard: many clients who leave early, documents that change, budgets that are too small.

Each client owns some documents, adds, replaces and deletes them, and asks about them. Every answer must be that of an engine
which has the document of that moment and nothing else to do; a document that was deleted is not known any more. In the middle
the server is stopped and started again, and later killed::

    python -m tests.faults.serving --seconds 600 --clients 32
    python -m tests.faults.serving --seconds 600 --clients 32 --backend vllm
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from cacheblend_lab.reference import load_tokenizer
from cacheblend_rag import BlendEngine
from cacheblend_rag.config import EngineConfig
from cacheblend_rag.documents.splitter import named_passages
from cacheblend_serve.completions import calls_for
from cacheblend_serve.settings import ServeConfig
from cacheblend_serve.wire import CompletionRequest
from integrations.serve.tests.process import LEAST, ServerProcess
from tests.families import tiny_reader, words

DOCUMENTS_OF_A_CLIENT, VERSIONS, TOKENS = 2, 3, 6
# After so many seconds threads that have nothing to do may end.
REST_S = 15.0
# How much more memory, in bytes, the server may have at the end than after its first part.
GROWTH = 60 << 20


def chunks_of(document: int, version: int) -> list[str]:
    """Return the chunks of a version; the first one is that of all versions."""
    return [words(16, document * 100), words(20, document * 100 + 10 * version + 1), words(14, document * 100 + 50)]


def question_of(document: int) -> str:
    return f"Question: {words(5, document + 7)}"


def body_of(document: int) -> dict[str, object]:
    asked = {"prompt": question_of(document), "documents": [f"d{document}"]}
    return {**asked, "temperature": 0, "max_tokens": TOKENS, "recompute_ratio": 0, "report": True}


def naive_answers(folder: Path, documents: int) -> dict[tuple[int, int], str]:
    """Return what an engine answers that is asked for nothing else, by document and version."""
    found = {}
    config = EngineConfig(dtype="float32", separator="\n\n")
    with BlendEngine.from_pretrained(folder, config=config) as engine:
        for document in range(documents):
            for version in range(VERSIONS):
                engine.delete(engine.document(f"d{document}"))
                engine.add([each.chunk for each in named_passages(f"d{document}", chunks_of(document, version))])
                [asked] = calls_for(engine, CompletionRequest(**body_of(document)), ServeConfig())  # type: ignore[arg-type]
                found[document, version] = engine.generate(asked.prompt, TOKENS, do_sample=False).text
    return found


@dataclass
class Outcome:
    """What came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    flaws: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return "\n".join(
            [counts, *self.figures, f"{len(self.flaws)} flaws", *(f"  {flaw}" for flaw in self.flaws[:20])]
        )


def server_of(folder: Path, store: Path, log: Path, backend: str) -> ServerProcess:
    """Return a server of a model with budgets that are too small."""
    config = log.with_suffix(".yaml")
    # What was rounded on disk would be another answer where two tokens are nearly as likely.
    budget = {"ram_bytes": 300_000, "disk_bytes": 4_000_000, "disk_codec": "native", "dtype": "float32"}
    config.write_text(json.dumps(budget | {"separator": "\n\n"}), encoding="utf-8")
    options = ["--model", str(folder), "--store", str(store), "--backend", backend, "--config", str(config)]
    return ServerProcess(log, *options, *(LEAST if backend == "vllm" else ()))


class Client:
    """Somebody who owns documents and knows which version of each is there."""

    def __init__(self, number: int, naive: dict[tuple[int, int], str], outcome: Outcome) -> None:
        self._rng = random.Random(number)
        first = number * DOCUMENTS_OF_A_CLIENT
        # None is a document that is not there; after a failure it may be one of two.
        self._there: dict[int, set[int | None]] = {first + each: {None} for each in range(DOCUMENTS_OF_A_CLIENT)}
        self._naive = naive
        self._outcome = outcome

    async def work(self, server: ServerProcess, may_work: asyncio.Event) -> None:
        """Work for ever, while it may."""
        while await may_work.wait():
            document = self._rng.choice(list(self._there))
            chance = self._rng.random()
            try:
                async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
                    if chance < 0.2:
                        await self._put(http, document, self._rng.randrange(VERSIONS))
                    elif chance < 0.28:
                        await self._delete(http, document)
                    else:
                        await self._ask(http, document, leaves=self._rng.random() < 0.2)
            except httpx.TransportError:
                self._outcome.counts["cut off"] += 1
                await asyncio.sleep(0.2)

    async def _put(self, http: httpx.AsyncClient, document: int, version: int) -> None:
        before, self._there[document] = self._there[document], self._there[document] | {version}
        reply = await http.put(f"/v1/documents/d{document}", json={"chunks": chunks_of(document, version)})
        if self._is_refused(reply):
            # Nothing of a request that is not let in is done.
            self._there[document] = before
        elif reply.status_code == 200:
            self._there[document] = {version}
            self._outcome.counts["puts"] += 1
        else:
            self._flaw(f"PUT d{document}: {reply.status_code} {reply.text:.200}")

    async def _delete(self, http: httpx.AsyncClient, document: int) -> None:
        before, self._there[document] = self._there[document], self._there[document] | {None}
        reply = await http.delete(f"/v1/documents/d{document}")
        if self._is_refused(reply):
            self._there[document] = before
        elif reply.status_code == 200 or (reply.status_code == 404 and None in before):
            self._there[document] = {None}
            self._outcome.counts["deletes"] += 1
        else:
            self._flaw(f"DELETE d{document}, which was {before}: {reply.status_code} {reply.text:.200}")

    async def _ask(self, http: httpx.AsyncClient, document: int, leaves: bool) -> None:
        if leaves:
            async with http.stream("POST", "/v1/completions", json=body_of(document) | {"stream": True}) as reply:
                async for _ in reply.aiter_lines():
                    break
            self._outcome.counts["left early"] += 1
            return
        reply = await http.post("/v1/completions", json=body_of(document))
        there = self._there[document]
        if self._is_refused(reply):
            return
        if reply.status_code == 404 and None in there:
            self._there[document] = {None}
            self._outcome.counts["not there"] += 1
            return
        if reply.status_code != 200:
            self._flaw(f"asked about d{document}, which was {there}: {reply.status_code} {reply.text:.200}")
            return
        said = reply.json()
        text = said["choices"][0]["text"]
        could_be = {each for each in there if each is not None and self._naive[document, each] == text}
        if could_be:
            self._there[document] = could_be
            self._outcome.counts["right"] += 1
        else:
            stale = [each for each in range(VERSIONS) if self._naive[document, each] == text]
            seen = {key: said["blend"][0][key] for key in ("fallback_reason", "chunks")}
            self._flaw(f"d{document} is {there}, and the answer is that of {stale or 'none'}: {text!r}, with {seen}")

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
        # Whatever it writes, it writes to the end. Heads of fewer than 32 numbers vLLM does not compute on CPUs.
        model, tokenizer = tiny_reader(eos_token_id=None, hidden_size=128, intermediate_size=128), load_tokenizer()
        # vLLM ends at the tokenizer's own end, and leaves out a last letter that is not whole; neither is ever the likeliest.
        whole = [tokenizer.decode([token], skip_special_tokens=True) for token in range(len(tokenizer))]
        with torch.no_grad():
            model.lm_head.weight[[token for token, text in enumerate(whole) if not text or "\ufffd" in text]] = 0
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        yield Path(name)


def run(seconds: float, clients: int, backend: str = "engine") -> Outcome:
    """Use a server for so long; returns what came of it."""
    outcome = Outcome()
    with model_folder() as folder, tempfile.TemporaryDirectory() as name:
        naive = naive_answers(folder, clients * DOCUMENTS_OF_A_CLIENT)
        # Else an answer of yesterday's document could not be told.
        assert len(set(naive.values())) > 0.9 * len(naive)
        server = server_of(folder, Path(name) / "kv", Path(name) / "log", backend)
        server.start()
        everybody = [Client(number, naive, outcome) for number in range(clients)]
        try:
            for part, ending in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
                asyncio.run(_part(server, everybody, seconds / 3, ending, outcome))
                if part < 2:
                    server.start()
        except httpx.TransportError as error:
            outcome.flaws.append(f"{error!r}; the last that the server said: {server.said()[-4000:]}")
        finally:
            if server.process.poll() is None:
                server.process.kill()
    return outcome


async def _part(
    server: ServerProcess, everybody: list[Client], seconds: float, ending: signal.Signals, outcome: Outcome
) -> None:
    """Let everybody work, and end the server in the midst of it."""
    rest_s = min(REST_S, seconds / 6)
    may_work = asyncio.Event()
    working = [asyncio.create_task(client.work(server, may_work)) for client in everybody]
    held = []
    for _ in range(2):
        may_work.set()
        await asyncio.sleep(seconds / 2 - rest_s)
        may_work.clear()
        held.append(await _held_at_rest(server, rest_s))
    before, after = held
    may_work.set()
    outcome.figures.append(
        f"memory {before[0] >> 20} to {after[0] >> 20} MiB, threads {before[1]} to {after[1]}, files {before[2]} to {after[2]}"
    )
    if after[0] > before[0] + GROWTH or after[1] > before[1] + 8 or after[2] > before[2] + 40:
        outcome.flaws.append("the server has grown")
    await asyncio.sleep(1)
    await asyncio.to_thread(server.stop, ending)
    for task in working:
        task.cancel()
    results = await asyncio.gather(*working, return_exceptions=True)
    outcome.flaws += [repr(each) for each in results if isinstance(each, Exception)]


async def _held_at_rest(server: ServerProcess, rest_s: float) -> tuple[int, int, int]:
    """Return what the server holds when nobody has asked for a while."""
    await asyncio.sleep(rest_s)
    # Threads that have had nothing to do end when the next request comes.
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await http.get("/v1/documents")
    await asyncio.sleep(0.2)
    return server.held()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--backend", default="engine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    outcome = run(given.seconds, given.clients, given.backend)
    print(outcome)
    sys.exit(bool(outcome.flaws))


if __name__ == "__main__":
    main()
