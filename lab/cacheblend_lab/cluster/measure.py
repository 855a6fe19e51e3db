"""Measures a replica's costs on this machine: one real server, asked for chunks whose tier is known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from cacheblend_attachments.auto.measure import fit_costs
from cacheblend_lab.cluster.asking import Answered, Asker, store_corpus
from cacheblend_lab.cluster.caches import Capacities
from cacheblend_lab.cluster.cores import Cores
from cacheblend_lab.cluster.costs import Costs, TierCost
from cacheblend_lab.cluster.servers import Servers, cpu_s
from cacheblend_lab.cluster.workload import Workload
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.tuning import usable_cores

__all__ = ["Scan", "fit", "measure_cores", "measure_costs", "scan_server", "stored_chunk_bytes"]

# Of clients at once; of answers' tokens, of questions' words, and of chunks a prompt, each few and many.
_CLIENTS = (2, 8)
_OUTPUT_TOKENS = (1, 12)
_QUESTION_WORDS = (8, 60)
# Requests of a scan that begin before a batch has formed and caches are as they will be.
_FIRST = 8
_FEW_DOCUMENTS = 10
_PLENTY_BYTES = 10**10


@dataclass(frozen=True)
class Scan:
    """One run of requests against one server.

    Attributes
    ----------
    requests, batches, answer_steps, batch_steps : float
        Requests, batches of answers, steps of decoding of all answers, and of all batches.
    computed_tokens, reused_tokens : int
        Of all prompts.
    ram, disk, remote : int
        Chunks by the tier they were in.
    remote_requests : int
        Requests that had any in the remote tier.
    took_s, cpu_s : float
        Seconds on the clock, and of CPU time of server, remote tier and client together.
    """

    requests: int
    batches: float
    answer_steps: int
    batch_steps: float
    computed_tokens: int
    reused_tokens: int
    ram: int
    disk: int
    remote: int
    remote_requests: int
    took_s: float
    cpu_s: float


def measure_cores(urls: Sequence[str], workload: Workload, in_ram: int, clients: int, requests: int) -> Cores:
    """Return what this machine's cores do for one of the servers on it, for two, and so on, asked for chunks in their RAM.

    Processes share more than cores, and how much they have of that depends on what they do: so it is the servers' own work that
    is measured, each of one thread and asked by `clients`. Cores beyond the servers are taken to be whole ones.
    """
    rates = []
    for servers in range(1, len(urls) + 1):
        asked = _circle(in_ram // 2, workload.chunks)
        asker = Asker(urls[:servers], workload.output_tokens, _QUESTION_WORDS[0])
        answers = asker.ask([next(asked) for _ in range(servers * requests)], servers * clients)
        # Without what was read into RAM, and the end, when some have nothing to do any more.
        first, last = len(answers) // 3, len(answers) - servers * clients
        rates.append((last - first) / (answers[last - 1].ended_at - answers[first - 1].ended_at))
    powers = [min(rate / rates[0], float(servers)) for servers, rate in enumerate(rates, 1)]
    return Cores((*powers, *map(float, range(len(powers) + 1, usable_cores() + 1))))


def scan_server(
    url: str,
    process_ids: Sequence[int],
    workload: Workload,
    in_ram: int,
    on_disk: int,
    requests: int,
    say: Callable[[str], None] = lambda _: None,
) -> list[Scan]:
    """Ask one server, which has the workload's corpus, again and again for chunks of which the tier is known.

    Chunks that are asked for in a circle are never in a tier that holds fewer: a circle that fits into RAM is read from RAM, one
    that only fits on disk from there, and one that fits on neither from the remote tier. A tier with room for `in_ram` or
    `on_disk` KVs is sure to fit half as many chunks. The CPU time of `process_ids`, the server's and the remote tier's, counts.
    """
    circles = {
        "ram": in_ram // 2,
        "disk": min(on_disk // 2, workload.corpus_chunks),
        "remote": workload.corpus_chunks,
    }
    if not circles["ram"] > 0 or not in_ram < circles["disk"] or not on_disk < circles["remote"]:
        raise CacheBlendError(
            f"{in_ram} KVs in RAM and {on_disk} on disk, of {workload.corpus_chunks} chunks: each tier must hold well over twice "
            "the last"
        )
    scans = []
    for tier, chunks in product(circles, (max(workload.chunks // 2, 1), workload.chunks)):
        asked = _circle(circles[tier], chunks)
        asker = Asker([url], 1, _QUESTION_WORDS[0])
        # Twice around, so that the circle is where it will be.
        asker.ask([next(asked) for _ in range(-(-2 * circles[tier] // chunks) if tier != "remote" else 4)], 1)
        for clients, (outputs, words) in product(_CLIENTS, zip(_OUTPUT_TOKENS, _QUESTION_WORDS, strict=True)):
            for output_tokens in {outputs, *(_OUTPUT_TOKENS if clients == _CLIENTS[0] else ())}:
                say(f"{tier}, {chunks} chunks, {clients} clients, {output_tokens} tokens, {words} words")
                asker = Asker([url], output_tokens, words)
                used_s = cpu_s(process_ids)
                answers = asker.ask([next(asked) for _ in range(requests)], clients)
                scans.append(_scan(answers, cpu_s(process_ids) - used_s))
    return scans


def _circle(size: int, chunks: int) -> Iterator[list[int]]:
    """Yield prompts of chunks that follow each other around a circle."""
    at = 0
    while True:
        yield [(at + number) % size for number in range(min(chunks, size))]
        at = (at + chunks) % size


def _scan(answers: Sequence[Answered], used_s: float) -> Scan:
    counted = answers[_FIRST:]
    took_s = counted[-1].ended_at - answers[_FIRST - 1].ended_at
    steps = [(each.output_tokens - 1, each.batch_size) for each in counted]
    return Scan(
        requests=len(counted),
        batches=sum(1 / size for _, size in steps),
        answer_steps=sum(count for count, _ in steps),
        batch_steps=sum(count / size for count, size in steps),
        computed_tokens=sum(each.computed_tokens for each in counted),
        reused_tokens=sum(each.context_tokens for each in counted),
        ram=sum(each.reads.ram for each in counted),
        disk=sum(each.reads.disk for each in counted),
        remote=sum(each.reads.remote for each in counted),
        remote_requests=sum(each.reads.remote > 0 for each in counted),
        took_s=took_s,
        # What the first took as well is taken out by their number.
        cpu_s=used_s * len(counted) / len(answers),
    )


def measure_costs(
    folder: Path,
    model: str,
    remote: str,
    workload: Workload,
    words: int,
    in_ram: int,
    on_disk: int,
    requests: int,
    remote_process_ids: Sequence[int] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Costs, list[Scan]]:
    """Start one server, scan it, and return a replica's costs and what they were fitted to.

    The folder is empty, nothing else uses the remote tier, whose processes are named where they are on this machine.
    """
    say("measuring the size of chunks")
    chunk_bytes = stored_chunk_bytes(folder / "size", model, remote, workload, words)
    (folder / "scan").mkdir()
    room = Capacities((in_ram + 0.5) * chunk_bytes, (on_disk + 0.5) * chunk_bytes)
    with Servers(folder / "scan", model, 1, room, remote) as servers:
        say("handing the corpus over")
        store_corpus(servers.urls, workload, words)
        processes = [*servers.process_ids, *remote_process_ids]
        scans = scan_server(servers.urls[0], processes, workload, in_ram, on_disk, requests, say)
    tokens = sum(each.reused_tokens for each in scans) / sum(each.ram + each.disk + each.remote for each in scans)
    return fit(scans, chunk_bytes / tokens, f"{model}, one thread"), scans


def stored_chunk_bytes(folder: Path, model: str, remote: str, workload: Workload, words: int) -> float:
    """Return the bytes of a chunk as it is stored, on average over a few documents."""
    folder.mkdir(parents=True)
    few = replace(workload, corpus_chunks=workload.chunks_per_document * max(workload.documents, _FEW_DOCUMENTS))
    with Servers(folder, model, 1, Capacities(_PLENTY_BYTES, _PLENTY_BYTES), remote) as servers:
        store_corpus(servers.urls, few, words)
        count, stored = servers.stored_bytes()
    return stored / count


def fit(scans: Sequence[Scan], stored_bytes_per_token: float, name: str) -> Costs:
    """Return costs that fit scans: the sum of their parts, none below 0, with the least relative errors.

    Server and client are on one machine: what takes CPU time beside the time on the clock runs on other cores meanwhile.
    """
    amounts = [
        (
            each.requests,
            each.computed_tokens,
            each.reused_tokens,
            each.batch_steps,
            each.answer_steps,
            each.disk,
            each.remote,
            each.remote_requests,
        )
        for each in scans
    ]
    fitted = fit_costs(amounts, [each.took_s for each in scans])
    request, computed, reused, step, answer, disk, remote, first_remote = fitted
    # The model's own thread, and what is beside it.
    busy, beside_request, beside_remote = fit_costs(
        [(each.took_s, each.requests, each.remote) for each in scans], [each.cpu_s for each in scans]
    )
    return Costs(
        name=name,
        source=f"measured: {len(scans)} scans of one server, off by {_off_by(scans, amounts, fitted):.1%} on average",
        stored_bytes_per_token=stored_bytes_per_token,
        prefill_s_per_request=request,
        prefill_s_per_token=computed,
        reuse_s_per_token=reused,
        decode_s_per_step=step,
        decode_s_per_answer_step=answer,
        beside_s_per_request=beside_request,
        busy_share=min(busy, 1.0),
        disk=TierCost(disk),
        remote=TierCost(remote, beside_s=beside_remote, first_s=first_remote),
    )


def _off_by(scans: Sequence[Scan], amounts: Sequence[Sequence[float]], costs: Sequence[float]) -> float:
    """Return by which share of itself a scan's time differs from what the costs say, on average."""
    said = [sum(amount * cost for amount, cost in zip(each, costs, strict=True)) for each in amounts]
    return sum(abs(told / scan.took_s - 1) for told, scan in zip(said, scans, strict=True)) / len(scans)
