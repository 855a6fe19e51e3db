"""The loader gives the layers that a naive reference gives, however it shares out the work, and leaves nothing behind."""

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import ChunkKV, LayerKV, shift_layer
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.model import Decoder, inspect_model
from cacheblend_rag.prefixes import RowsReader
from cacheblend_rag.store import KVReader, KVStore, open_store
from tests.families import tiny_model
from tests.store.kit import damage, put_kv


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return inspect_model(tiny_model("llama"))


@pytest.fixture(scope="module", autouse=True)
def _as_if_layers_were_large() -> Iterator[None]:
    """Have small layers go the ways of large ones: in pieces, read ahead by threads, from RAM too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.loader._THREAD_PAYS_BYTES", 0)
        patch.setattr("cacheblend_rag.loader._CPU_TIERS", frozenset())
        patch.setattr("cacheblend_rag.loader._PIECE_BYTES", 1)
        yield


def key_of(number: int) -> str:
    return f"{number:08x}"


@dataclass
class Prompt:
    """Chunks with random KV, and where they stand in a prompt."""

    chunks: list[ChunkKV]
    layout: PromptLayout

    def put(self, store: KVStore, numbers: Sequence[int] | None = None) -> None:
        for number in range(len(self.chunks)) if numbers is None else numbers:
            put_kv(store, key_of(number), self.chunks[number])

    def readers(self, store: KVStore) -> list[KVReader]:
        found = [store.open(key_of(number)) for number in range(len(self.chunks))]
        return [reader for reader in found if reader is not None]

    def naive(self, decoder: Decoder, layer: int) -> LayerKV:
        """Put one chunk after the other at its place, its keys moved alone."""
        heads, _, width = self.chunks[0].layers[layer].keys.shape
        whole = LayerKV(*(torch.zeros(1, heads, len(self.layout), width) for _ in range(2)))
        rotation = decoder.rotations[layer]
        assert rotation is not None
        for chunk, span in zip(self.chunks, self.layout.chunks, strict=True):
            keys = chunk.layers[layer].keys.clone()
            distance = torch.full((len(span),), span.position - chunk.start)
            shift_layer(LayerKV(keys, keys), rotation.table(distance, keys.device))
            whole.keys[0, :, span.start : span.stop] = keys
            whole.values[0, :, span.start : span.stop] = chunk.layers[layer].values
        return whole


def make_prompt(lengths: Sequence[int], gaps: Sequence[int], layers: int = 6) -> Prompt:
    source = torch.Generator().manual_seed(sum(lengths))
    chunks, spans, row = [], [], 1
    for number, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        kv = [LayerKV(*(torch.randn(2, length, 8, generator=source) for _ in range(2))) for _ in range(layers)]
        chunks.append(ChunkKV(tuple(range(number, number + length)), 1, kv))
        spans.append(ChunkSpan(row + gap, row + gap + length, row + gap))
        row = spans[-1].stop
    ids = tuple(range(row + 1))
    return Prompt(chunks, PromptLayout(ids, ids, tuple(spans)))


CHUNKS = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 0, 1, 7, 32, 33, 50])), min_size=1, max_size=5)


@settings(max_examples=25)
@given(
    chunks=CHUNKS,
    near=st.sets(st.integers(0, 4)),
    ram_bytes=st.sampled_from([0, 20_000, 2**40]),
    threads=st.sampled_from([0, 1, 2, 4]),
    ahead=st.integers(1, 7),
    first_layer=st.integers(0, 5),
    room=st.integers(0, 9),
    staged=st.booleans(),
    resident=st.booleans(),
    infers=st.booleans(),
)
def test_layers_are_those_of_the_naive_reference(
    decoder: Decoder,
    chunks: list[tuple[int, int]],
    near: set[int],
    ram_bytes: int,
    threads: int,
    ahead: int,
    first_layer: int,
    room: int,
    staged: bool,
    resident: bool,
    infers: bool,
) -> None:
    """Read twice, in which KV comes from disk into RAM, as far as that has room; the first chunk is on its device, if `resident`.

    With `staged`, layers go the way that they go to other devices than the CPU, some of them from page-locked memory. In
    inference mode (`infers`) a serving engine calls its connector.
    """
    prompt = make_prompt([length for length, _ in chunks], [gap for _, gap in chunks])
    rows, capacity = prompt.layout.context_rows, len(prompt.layout) + room
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.loader._is_staged", lambda device: staged)
        patch.setattr("cacheblend_rag.loader._is_page_locked", lambda part: part.keys.shape[1] % 2 == 0)
        with closing(open_store(Path(folder), 0)) as elsewhere:
            prompt.put(elsewhere)
        with closing(open_store(Path(folder), ram_bytes)) as store:
            prompt.put(store, [number for number in near if number < len(chunks)])
            for _ in range(2):
                readers = prompt.readers(store)
                if resident:
                    first = prompt.chunks[0]
                    readers[0] = RowsReader(
                        first.token_ids, [LayerKV(*(part[None] for part in each)) for each in first.layers]
                    )
                    readers[0].start = first.start
                given = (decoder, prompt.layout, readers, first_layer, capacity, ahead, threads)
                with torch.inference_mode(infers), LayerLoader(*given) as loader:
                    for layer in range(first_layer, decoder.num_layers):
                        loaded, wanted = loader.synchronize(layer), prompt.naive(decoder, layer)
                        assert loaded.keys.shape[2] == capacity
                        assert torch.equal(loaded.keys[:, :, rows], wanted.keys[:, :, rows])
                        assert torch.equal(loaded.values[:, :, rows], wanted.values[:, :, rows])
                read = [kv.nbytes for kv, each in zip(prompt.chunks, readers, strict=True) if each.tier != "device"]
                assert loader.load_bytes == sum(read) // decoder.num_layers * (decoder.num_layers - first_layer)
            # What was read from end to end is nearer now, unless most of it was never asked for.
            if first_layer * 2 <= decoder.num_layers and ram_bytes == 2**40:
                assert {each.tier for each in readers} <= {"device", "ram"}


def left() -> list[str]:
    """Return the loader's threads that run, and the chunk files that are open."""
    gc.collect()
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("cacheblend-loader")]
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found += [target for target in [os.readlink(descriptor)] if ".safetensors" in target]
        except OSError:
            continue
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")


@needs_proc
@pytest.mark.parametrize(("threads", "asked"), [(0, 0), (0, 3), (1, 1), (4, 0), (4, 3)])
def test_closing_early_leaves_nothing(decoder: Decoder, tmp_path: Path, threads: int, asked: int) -> None:
    prompt = make_prompt([9, 8, 7], [0, 3, 40])
    with closing(open_store(tmp_path, ram_bytes=0)) as store:
        prompt.put(store)
        readers = prompt.readers(store)
        with LayerLoader(decoder, prompt.layout, readers, 0, len(prompt.layout), 2, threads) as loader:
            for layer in range(asked):
                loader.synchronize(layer)
            assert len([each for each in left() if ".safetensors" in each]) == 3
        del loader, readers
        assert left() == []


@needs_proc
@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("damaged", [0, 2])
def test_errors_reach_whoever_waits_and_nothing_is_left(
    decoder: Decoder, tmp_path: Path, threads: int, damaged: int
) -> None:
    prompt = make_prompt([9, 8, 7], [0, 3, 40])
    with closing(open_store(tmp_path, ram_bytes=0)) as store:
        prompt.put(store)
        readers = prompt.readers(store)
        (file,) = tmp_path.rglob(f"{key_of(damaged)}*.safetensors")
        damage(file)
        loader = LayerLoader(decoder, prompt.layout, readers, 0, len(prompt.layout), 2, threads)
        with pytest.raises(ChunkReadError) as caught, loader:
            list(map(loader.synchronize, range(decoder.num_layers)))
        assert caught.value.key == key_of(damaged)
        del loader, readers, caught
        assert left() == []
