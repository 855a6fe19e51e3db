"""The router: to the replica that was asked last for what a request names, or that it belongs to."""

from __future__ import annotations

import random
from collections import OrderedDict
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# Ray Serve loads the module of a router again, and with it classes that are in it.
from cacheblend_ray.call import MOST_NAMES, Call

__all__ = ["NearestRouter"]

# Names whose last replica is remembered.
_MOST_KNOWN = 200_000


class NearestRouter(RequestRouter):
    """Prefers the replica that was asked last for most of what a request names.

    What none was asked for belongs to one of them by rendezvous hashing, so that all fronts agree. A replica whose queue is
    longer than the shortest by more than `queue_bound` is not preferred: the less busy of two at random is then, as for requests
    that name nothing, which is how Ray Serve's own router chooses.
    """

    def initialize_state(self, **options: Any) -> None:
        """Take the options of the deployment's `RequestRouterConfig`: `queue_bound`."""
        self._queue_bound: float = options["queue_bound"]
        self._last: OrderedDict[str, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return whom a request may go to, best first."""
        known = {replica.replica_id: replica for replica in candidate_replicas}
        queues = {id: self.replica_queue_len_cache.get(id) or 0 for id in known}
        first = random.sample(list(known), min(2, len(known)))
        call = _call_of(pending_request)
        if call is not None and call.names and known:
            near = self._near(call.names, queues)
            is_free = queues[near] <= min(queues.values()) + self._queue_bound
            call.why = "near" if is_free else "load"
            first = [near] if is_free else first
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[known[id] for id in first], [known[id] for id in known if id not in first]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember which replica has what the request names from now on."""
        call = _call_of(pending_request)
        for name in () if call is None else call.names:
            self._last[name] = replica_id
            self._last.move_to_end(name)
        while len(self._last) > _MOST_KNOWN:
            self._last.popitem(last=False)

    def _near(self, names: tuple[str, ...], queues: dict[ReplicaID, int]) -> ReplicaID:
        scores = dict.fromkeys(queues, 0.0)
        for name in names:
            last = self._last.get(name)
            if last in scores:
                scores[last] += 1
            else:
                # Less than any that a replica was asked for.
                scores[max(queues, key=lambda id: _rank(id, name))] += 1 / MOST_NAMES
        return max(scores, key=lambda id: (scores[id], -queues[id]))


def _rank(replica: ReplicaID, name: str) -> bytes:
    return blake2b(f"{replica.unique_id}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _call_of(pending: PendingRequest | None) -> Call | None:
    given = pending.args[0] if pending is not None and pending.args else None
    return given if isinstance(given, Call) else None
