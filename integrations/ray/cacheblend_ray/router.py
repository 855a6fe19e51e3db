"""The request router: to the replica that has most of what a request names, unless that one is too busy."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.util.metrics import Counter

from cacheblend_ray.nearness import Call, Nearness

__all__ = ["NearestRouter"]

_QUEUE_BOUND = 4


class NearestRouter(RequestRouter):
    """Prefers the replica that has most of a request's documents and chunks nearest; where load wins over that, it is counted.

    Replicas report what they hold (`record_routing_stats`); what none holds belongs to one of them by rendezvous
    hashing. A replica whose queue is longer than the shortest by more than `queue_bound` is not preferred: the less busy of two
    at random is then, as for requests that name nothing, which is how Ray Serve's own router chooses.
    """

    def initialize_state(self, **options: Any) -> None:
        """Take the options of the deployment's `RequestRouterConfig`: `queue_bound`."""
        (queue_bound,) = ({"queue_bound": _QUEUE_BOUND} | options).values()
        self._nearness = Nearness(queue_bound)
        self._routed = Counter(
            "cacheblend_routed_requests",
            description="Requests by why they went where: near what they name, by load instead, or anywhere.",
            tag_keys=("why",),
        )

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of the replicas, and what they said."""
        super().update_replicas(replicas)
        self._nearness.learn(
            {
                replica.replica_id.unique_id: (
                    str(getattr(replica, "replica_metadata", {}).get("home", replica.replica_id.unique_id)),
                    replica.routing_stats or {},
                )
                for replica in replicas
            }
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return whom a request may go to, best first."""
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        queues = {id: self.replica_queue_len_cache.get(replica.replica_id) or 0 for id, replica in known.items()}
        call = None if pending_request is None else _call_of(pending_request)
        choice = self._nearness.choose(() if call is None else call.names, queues)
        if call is not None:
            call.why, call.near = choice.why, choice.first
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        return [[known[id] for id in choice.first], [known[id] for id in choice.others]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count why the request went where it goes, and tell it."""
        call = _call_of(pending_request)
        if call is None:
            return
        id = replica_id.unique_id
        if call.why == "near" and id not in call.near:
            # Those had no place left.
            call.why = "load"
        self._routed.inc(tags={"why": call.why})
        self._nearness.note_sent(id, call.names)


def _call_of(pending: PendingRequest) -> Call | None:
    given = pending.args[0] if pending.args else None
    return given if isinstance(given, Call) else None
