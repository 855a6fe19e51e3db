"""What the engine asks of a chunk KV store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from cacheblend_rag.codec import PackedKV
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.reading import Place, ReadingRules

__all__ = ["KVReader", "KVStore", "NameChanges", "NamedTarget", "NodeRecord", "StoreStats"]


class KVReader(Protocol):
    """Reads the stored KV of one chunk, layer by layer, from any number of threads at once."""

    @property
    def tier(self) -> str:
        """Where the bytes are: "device", "ram", "disk", or what a remote tier calls itself."""

    @property
    def codec(self) -> str:
        """How its layers are packed there, most of them if not all alike."""

    @property
    def packed_bytes(self) -> int:
        """Size of all layers as they are packed there."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that the KV was computed from."""

    @property
    def start(self) -> int:
        """The position that the keys of its first token are rotated to."""

    @property
    def context(self) -> str:
        """Digest of the tokens that it was computed behind, beside the encoding prefix; empty where alone."""

    @property
    def num_layers(self) -> int:
        """How many layers there are."""

    def layer(self, index: int) -> LayerKV:
        """Return one layer, ``(num_kv_heads, seq_len, head_dim)``, on the CPU; the caller must not write to it.

        Raises
        ------
        ChunkReadError
            If the bytes are gone, or do not match their checksum.
        """


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the store knows of a named chunk, whether or not its KV is held at the moment.

    Attributes
    ----------
    id : str
        The name.
    key : str
        The store key of its KV.
    text_hash : str
        Digest of its text (`cacheblend_rag.chunk.text_hash`).
    token_ids : tuple of int
        Its tokens.
    separator : tuple of int
        Tokens behind them of which there is KV too.
    place : Place or None
        Where it stands in its document, of a record that is to be recorded; looking a name up does not tell.
    """

    id: str
    key: str
    text_hash: str
    token_ids: tuple[int, ...]
    separator: tuple[int, ...] = ()
    place: Place | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NamedTarget:
    """How the KV of a named chunk is computed.

    Attributes
    ----------
    record : NodeRecord
        What is recorded of the chunk, or will be, with the key that its KV has in its context.
    context : tuple of int
        The tokens that it is encoded behind, beside the encoding prefix.
    lives_s : float or None
        Seconds that is left of the shortest time to live in its context, its own included; None where none ends.
    is_changed : bool
        Whether that is not what is recorded now.
    document : str or None
        The document that it is a piece of.
    """

    record: NodeRecord
    context: tuple[int, ...] = ()
    lives_s: float | None = None
    is_changed: bool = False
    document: str | None = None

    def placed(self, record: NodeRecord) -> NamedTarget:
        """Return the same with the place of the record that was handed in, for it to be recorded."""
        return replace(self, record=replace(self.record, place=record.place))


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What became of the names of a namespace.

    Attributes
    ----------
    mark : int
        What to ask with the next time.
    whole : bool
        Whether these are all names, rather than those that changed.
    names : list of (int, str or None, str or None)
        The number of each name, which it keeps as long as it is known, its id, and the digest of its text; the number alone
        where the name is gone.
    waiting : dict of (str, str)
        All names that have no number yet, because their KV waits to be written: ids and digests.
    """

    mark: int
    whole: bool
    names: list[tuple[int, str | None, str | None]]
    waiting: dict[str, str]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of a store.

    Attributes
    ----------
    nodes : int
        Named chunks of all models.
    entries : int
        Chunks whose KV is held.
    ram_bytes, disk_bytes : int
        Bytes of KV in RAM, and of files on disk.
    evictions : int
        Entries dropped for room since the store was opened.
    pinned_bytes : int
        Bytes that may not be dropped for room.
    waiting, waiting_bytes : int
        Chunks that wait to be written, and bytes of their KV.
    unwritten : int
        Misses that found no room to wait in and were not stored, since the store was opened.
    device_bytes : int
        Bytes of KV that is resident on the devices that compute.
    ram_evictions, device_evictions : int
        Copies dropped for room in RAM, and on devices, since the store was opened; without a folder RAM holds no copies, and what
        is dropped there is counted by `evictions` too.

    The figures of one tenant are `nodes`, `entries`, `ram_bytes`, `disk_bytes` and `device_bytes`; the others are the whole
    store's.
    """

    nodes: int
    entries: int
    ram_bytes: int
    disk_bytes: int
    evictions: int
    pinned_bytes: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    unwritten: int = 0
    device_bytes: int = 0
    ram_evictions: int = 0
    device_evictions: int = 0


class KVStore(Protocol):
    """Chunk KV under content keys, and the names by which chunks are asked for.

    A key is a digest of everything the KV depends on (model, tokenizer, encoding prefix, tokens) and of whose it is (the tenant),
    made by the engine. Names (node ids) live in a namespace, the digest of the model and the tenant, and map to keys; several
    names may share one key. KV that no name maps to may be kept until room is needed. All methods may be called from any thread.

    A time to live, `ttl_s`, makes KV a miss once it is over; None is for ever. Of several times asked for the longest counts.
    Names stay.
    """

    @property
    def is_private(self) -> bool:
        """Whether the store's contents end with this process and are reachable through this object alone."""

    @property
    def evictions(self) -> int:
        """Entries dropped for room since the store was opened, as `stats` has it; cheap."""

    def open(self, key: str) -> KVReader | None:
        """Return a reader of the KV under `key` and mark it as recently used, or None if it is not held.

        KV that is seen to be damaged is dropped with a warning, and None returned. A reader stays good when its KV is dropped.
        """

    def put(self, key: str, kv: ChunkKV, *, tenant: str = "", ttl_s: float | None = None) -> None:
        """Keep `kv` under `key`; on return it is durable where the store is.

        If `key` is held and looks sound already, no KV is written.

        Raises
        ------
        StoreFullError
            If it cannot be kept: the disk is full, or it alone exceeds the byte budget.
        StoreReadOnlyError
            If the store may not be written.
        """

    def put_later(
        self,
        key: str,
        kv: ChunkKV | PackedKV,
        namespace: str,
        records: Sequence[NodeRecord],
        known: Sequence[str] = (),
        *,
        tenant: str = "",
        ttl_s: float | None = None,
    ) -> bool:
        """Keep KV that was computed for an answer, and its names, and write both soon; until then they are held in RAM.

        If the names are removed before it is written, it is not written, and was never there.

        Parameters
        ----------
        key : str
            The key.
        kv : ChunkKV or PackedKV
            The KV; packed already where it is not to be packed otherwise.
        namespace : str
            Where its names are.
        records : sequence of NodeRecord
            Names nobody knew, to be recorded unless somebody else has recorded them by then.
        known : sequence of str
            Names that were known to lead to it.
        tenant : str
            Whose it is.
        ttl_s : float, optional
            How long it lives.

        Returns
        -------
        bool
            False if too much is waiting already; the KV is then not kept.
        """

    def settle(self) -> None:
        """Wait until everything that waited to be written is, or has failed to be."""

    def flush(self) -> None:
        """Wait until everything that waited to be written is, and raise the first error that was met.

        Raises
        ------
        StoreError
            If something could not be written since the last call.
        """

    def cache(self, key: str, kv: ChunkKV | PackedKV, *, tenant: str = "", ttl_s: float | None = None) -> None:
        """Keep `kv` in RAM only, until room is needed; for KV that has no name by which it could be deleted."""

    def holds(self, keys: Sequence[str], *, durable: bool = False) -> list[bool]:
        """Return for each key whether its KV is held; with `durable` what waits to be written does not count."""

    def lifetimes(self, keys: Sequence[str]) -> list[float | None]:
        """Return for how many seconds from now the KV under each key lives, infinity for ever; None where none is held here.

        What only a remote tier holds counts as not held.
        """

    def prolong(self, keys: Sequence[str], ttl_s: float | None) -> None:
        """Let KV that is held live for that long from now at least."""

    def discard(self, key: str) -> None:
        """Drop the KV under `key`, damaged or not wanted any more; names stay.

        Where the store may not be written, this object does not open it again.
        """

    def release(self, keys: Sequence[str]) -> None:
        """Drop the KV under those of the keys that no name maps to."""

    def name(
        self,
        namespace: str,
        records: Iterable[NodeRecord],
        *,
        tenant: str = "",
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """Record names, replacing earlier records of the same ids; KV that loses its last name is dropped.

        Chunks with a place are put into their documents, which are then read by `rules`. So the keys of chunks behind them change
        too, all in one transaction; a record's own key is made anew from what it is behind by then.
        """

    def rehearse(
        self,
        namespace: str,
        records: Sequence[NodeRecord],
        *,
        rules: ReadingRules | None = None,
        ttl_s: float | None = None,
    ) -> list[NamedTarget]:
        """Return what `name` would lead to, without recording anything: the records, in their order, then the chunks of their
        documents whose keys would change.
        """

    def targets(self, namespace: str, ids: Sequence[str]) -> list[NamedTarget | None]:
        """Return how the KV of each name is computed; None where the name is unknown."""

    def documents(self, namespace: str, ids: Sequence[str]) -> list[str | None]:
        """Return the document that each name is a piece of; None where it is one of none, or unknown."""

    def document(self, namespace: str, document: str) -> list[str]:
        """Return the ids of a document's chunks in reading order."""

    def document_tokens(self, namespace: str, document: str) -> tuple[int, ...]:
        """Return the tokens of a whole document; what overlaps stands there once, none where it is unknown."""

    def lookup(self, namespace: str, ids: Sequence[str]) -> list[NodeRecord | None]:
        """Return the record of each id, or None where the name is unknown."""

    def forget(self, namespace: str, ids: Sequence[str]) -> int:
        """Remove names, and drop KV that loses its last name; return how many names there were."""

    def names(self, namespace: str) -> list[str]:
        """Return all ids of a namespace, in the order they were first recorded."""

    def revision(self) -> int:
        """Return a number that every change to a name raises, by whatever process; equal numbers mean that no name changed."""

    def changes(self, namespace: str, since: int | None = None) -> NameChanges:
        """Return the names that changed since an earlier call, or all of them.

        Parameters
        ----------
        namespace : str
            Where the names are.
        since : int, optional
            The `mark` of the earlier call; by default all names are returned, and so they are if the call was too long ago.
        """

    def pin(self, namespace: str, ids: Sequence[str]) -> None:
        """Never drop the KV of these names for room, now held or later.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is pinned then.
        StoreFullError
            If more would be pinned than the disk's byte budget.
        """

    def unpin(self, namespace: str, ids: Sequence[str]) -> None:
        """Let the KV of these names be dropped for room again.

        Raises
        ------
        UnknownChunkError
            If a name is unknown; nothing is unpinned then.
        """

    def clear(self, tenant: str | None = None) -> None:
        """Drop all KV and all names, or those of one tenant; "" is for what is no tenant's."""

    def tenants(self) -> list[str]:
        """Return the tenants that have KV or names; "" stands for what is no tenant's."""

    def stats(self, tenant: str | None = None) -> StoreStats:
        """Return the store's figures, or one tenant's."""

    def close(self) -> None:
        """Release files and connections; further calls are errors. Closing twice does nothing."""
