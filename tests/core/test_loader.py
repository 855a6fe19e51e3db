"""The loader gives the layers that a naive reference gives, however it shares out the work, and leaves nothing behind."""

import gc
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ChunkReadError
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.layout import ChunkSpan, PromptLayout
from cacheblend_rag.loader import LayerLoader
from cacheblend_rag.loader.buffers import BufferPool
from cacheblend_rag.model import Decoder, inspect_model
from cacheblend_rag.rope import shift_layer
from cacheblend_rag.store import KVReader, KVStore, open_store
from cacheblend_rag.store.memory import DeviceReader, DeviceTier, RamReader, ResidentKV
from cacheblend_rag.store.tiers import PromotingReader, Promotion
from tests.engines import MakeEngine
from tests.families import tiny_model, words
from tests.store.kit import read, same

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 20, 17))]
PROMPT = BlendPrompt("t5", CHUNKS, "t6 t7")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return inspect_model(tiny_model("llama"))


@pytest.fixture(autouse=True)
def _threads_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheblend_rag.loader.layers._THREAD_PAYS_BYTES", 0)
    # Such tests read from RAM.
    monkeypatch.setattr("cacheblend_rag.loader.layers._CPU_TIERS", frozenset())
    monkeypatch.setattr("cacheblend_rag.loader.assembly._PIECE_BYTES", 1)


@dataclass
class Prompt:
    """Chunks with random KV, where they stand in a prompt, and how they are stored."""

    chunks: list[ChunkKV]
    layout: PromptLayout
    tiers: list[str]

    def readers(self, ram: KVStore, disk: KVStore, risen: dict[int, ResidentKV]) -> list[KVReader]:
        """Open every chunk: on its device, in RAM, on the way from there to its device, on disk, or on disk on its way to RAM."""
        found: list[KVReader] = []
        device = DeviceTier(2**40)
        for number, (chunk, tier) in enumerate(zip(self.chunks, self.tiers, strict=True)):
            if tier == "device":
                placed = [device.place(*each) for each in enumerate(chunk.layers)]
                found.append(DeviceReader(ResidentKV(chunk.token_ids, chunk.start, placed, chunk.context)))
                continue
            if tier == "rising":
                keep = partial(risen.__setitem__, number)
                reader = RamReader(chunk)
                rising = Promotion(device, reader, chunk.nbytes, reader.layer, keep)
                found.append(PromotingReader(reader, None, rising))
                continue
            store = ram if tier == "promoted" else disk
            store.put(f"{number:08x}", chunk)
            if tier == "promoted":
                store._tiers.clear(None)  # type: ignore[attr-defined]
            reader = RamReader(chunk) if tier == "ram" else store.open(f"{number:08x}")
            assert reader is not None
            assert reader.tier == ("ram" if tier == "ram" else "disk")
            found.append(reader)
        return found

    def naive(self, decoder: Decoder, layer: int) -> LayerKV:
        """Put one chunk after the other at its place, its keys moved alone."""
        heads, _, width = self.chunks[0].layers[layer].keys.shape
        whole = LayerKV(*(torch.zeros(1, heads, len(self.layout), width) for _ in range(2)))
        rotation = decoder.rotations[layer]
        assert rotation is not None
        for chunk, span in zip(self.chunks, self.layout.chunks, strict=True):
            keys = chunk.layers[layer].keys.clone()
            distance = span.position - chunk.start
            if distance:
                shift_layer(LayerKV(keys, keys), rotation.table(torch.full((len(span),), distance), keys.device))
            whole.keys[0, :, span.start : span.stop] = keys
            whole.values[0, :, span.start : span.stop] = chunk.layers[layer].values
        return whole


def make_prompt(lengths: Sequence[int], gaps: Sequence[int], tiers: Sequence[str], decoder: Decoder) -> Prompt:
    source = torch.Generator().manual_seed(sum(lengths))
    chunks, spans, row = [], [], 1
    for number, (length, gap) in enumerate(zip(lengths, gaps, strict=True)):
        layers = [
            LayerKV(*(torch.randn(2, length, 8, generator=source) for _ in range(2))) for _ in range(decoder.num_layers)
        ]
        chunks.append(ChunkKV(tuple(range(number, number + length)), 1, layers))
        spans.append(ChunkSpan(row + gap, row + gap + length, row + gap))
        row = spans[-1].stop
    ids = tuple(range(row + 1))
    return Prompt(chunks, PromptLayout(ids, ids, tuple(spans)), list(tiers))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], list[int], list[str]]:
    count = draw(st.integers(1, 5))
    lists = partial(st.lists, min_size=count, max_size=count)
    tiers = st.sampled_from(["device", "ram", "rising", "disk", "promoted"])
    return draw(lists(st.integers(1, 40))), draw(lists(st.sampled_from([0, 0, 1, 7, 32, 33, 50]))), draw(lists(tiers))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=prompts(),
    threads=st.sampled_from([0, 1, 2, 4]),
    ahead=st.integers(1, 7),
    first_layer=st.integers(0, 5),
    room=st.integers(0, 9),
    staged=st.booleans(),
    infers=st.booleans(),
)
def test_layers_are_those_of_the_naive_reference(
    decoder: Decoder,
    made: tuple[list[int], list[int], list[str]],
    threads: int,
    ahead: int,
    first_layer: int,
    room: int,
    staged: bool,
    infers: bool,
) -> None:
    """With `staged`, layers go the way that they go to other devices than the CPU, some of them from page-locked memory.

    In inference mode (`infers`) a serving engine calls its connector.
    """
    prompt = make_prompt(*made, decoder)
    rows = prompt.layout.context_rows
    risen: dict[int, ResidentKV] = {}
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("cacheblend_rag.loader.assembly._is_staged", lambda device: staged)
        locked = {c.layers[0].keys.shape[1] for c, t in zip(prompt.chunks, prompt.tiers, strict=True) if t == "ram"}
        patch.setattr("cacheblend_rag.loader.assembly._is_page_locked", lambda part: part.keys.shape[1] in locked)
        ram = open_store(Path(folder) / "kv", ram_bytes=2**40)
        disk = open_store(Path(folder) / "kv", ram_bytes=0)
        readers = prompt.readers(ram, disk, risen)
        with (
            torch.inference_mode(infers),
            LayerLoader(
                decoder, prompt.layout, readers, first_layer, len(prompt.layout) + room, ahead, threads
            ) as loader,
        ):
            for layer in range(first_layer, decoder.num_layers):
                loaded, wanted = loader.synchronize(layer), prompt.naive(decoder, layer)
                assert loaded.keys.shape[2] == len(prompt.layout) + room
                assert torch.equal(loaded.keys[:, :, rows], wanted.keys[:, :, rows])
                assert torch.equal(loaded.values[:, :, rows], wanted.values[:, :, rows])
        loaded_bytes = [kv.nbytes for kv, tier in zip(prompt.chunks, prompt.tiers, strict=True) if tier != "device"]
        layer_bytes = sum(loaded_bytes) // decoder.num_layers
        assert loader.load_bytes == layer_bytes * (decoder.num_layers - first_layer)
        # What was read from end to end is now in RAM, unless most of it was never asked for.
        promoted = {f"{n:08x}" for n, tier in enumerate(prompt.tiers) if tier == "promoted"}
        if first_layer * 2 <= decoder.num_layers:
            assert set(ram._tiers.ram.keys()) == promoted  # type: ignore[attr-defined]
        # What was put on its device is there now, as it was stored; and what was there is what it was.
        is_asked = first_layer * 2 <= decoder.num_layers
        rising = {n for n, tier in enumerate(prompt.tiers) if tier == "rising"}
        assert risen.keys() == (rising if is_asked else set())
        resident = {n: reader for n, reader in enumerate(readers) if isinstance(reader, DeviceReader)}
        resident |= {n: DeviceReader(kv) for n, kv in risen.items()}
        for number, reader in resident.items():
            assert same(read(reader), prompt.chunks[number])
        ram.close()
        disk.close()


class _Watched(KVReader):
    """A reader in RAM that tells what is read of it."""

    def __init__(self, kv: ChunkKV) -> None:
        self._reader = RamReader(kv)
        self.token_ids, self.start, self.num_layers, self.tier = kv.token_ids, kv.start, len(kv.layers), "ram"
        self.read: list[int] = []
        self.intra_op_threads: set[int] = set()
        self.error: Exception | None = None

    def layer(self, index: int) -> LayerKV:
        self.read.append(index)
        if threading.current_thread() is not threading.main_thread():
            self.intra_op_threads.add(torch.get_num_threads())
        if self.error is not None:
            raise self.error
        return self._reader.layer(index)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("ahead", [1, 3])
def test_the_window_is_bounded(decoder: Decoder, threads: int, ahead: int) -> None:
    prompt = make_prompt([5, 6, 7], [0, 0, 40], ["ram"] * 3, decoder)
    readers = [_Watched(chunk) for chunk in prompt.chunks]
    with LayerLoader(decoder, prompt.layout, readers, 0, len(prompt.layout), ahead, threads) as loader:
        for layer in range(decoder.num_layers):
            loader.synchronize(layer)
            assert max(max(reader.read, default=0) for reader in readers) <= layer + ahead
    for reader in readers:
        assert sorted(reader.read) == list(range(decoder.num_layers))


def test_without_threads_nothing_is_read_ahead_and_no_thread_starts(decoder: Decoder) -> None:
    prompt = make_prompt([5, 6], [0, 0], ["ram"] * 2, decoder)
    readers = [_Watched(chunk) for chunk in prompt.chunks]
    before = threading.active_count()
    with LayerLoader(decoder, prompt.layout, readers, 1, len(prompt.layout), 3, 0) as loader:
        assert threading.active_count() == before
        for layer in range(1, decoder.num_layers):
            loader.synchronize(layer)
            assert [reader.read[-1] for reader in readers] == [layer, layer]


def test_loader_threads_compute_alone_and_leave_other_threads_as_they_are(decoder: Decoder) -> None:
    prompt = make_prompt([9, 9], [0, 40], ["ram"] * 2, decoder)
    readers = [_Watched(chunk) for chunk in prompt.chunks]
    started = threading.Event()

    def note() -> None:
        seen.append(torch.get_num_threads())

    seen: list[int] = []
    own = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with LayerLoader(decoder, prompt.layout, readers, 0, len(prompt.layout), 9, 2) as loader:
            while not all(reader.read and reader.read[-1] == decoder.num_layers - 1 for reader in readers):
                started.wait(0.001)
            for layer in range(decoder.num_layers):
                loader.synchronize(layer)
            other = threading.Thread(target=note)
            other.start()
            other.join()
        assert torch.get_num_threads() == 3
        assert seen == [3]
        if torch.backends.openmp.is_available() and os.name == "posix" and os.uname().sysname == "Linux":
            assert readers[0].intra_op_threads | readers[1].intra_op_threads == {1}
    finally:
        torch.set_num_threads(own)


def load_all(decoder: Decoder, prompt: Prompt, readers: Sequence[KVReader], threads: int) -> None:
    with LayerLoader(decoder, prompt.layout, readers, 0, len(prompt.layout), 2, threads) as loader:
        for layer in range(decoder.num_layers):
            loader.synchronize(layer)


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cacheblend-loader")]


def open_files() -> list[str]:
    gc.collect()
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if ".safetensors" in target:
            found.append(target)
    return found


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")


@needs_proc
@pytest.mark.parametrize(("threads", "asked"), [(0, 0), (0, 3), (1, 1), (4, 0), (4, 3)])
def test_closing_early_leaves_nothing(decoder: Decoder, tmp_path: Path, threads: int, asked: int) -> None:
    prompt = make_prompt([9, 8, 7], [0, 3, 40], ["disk"] * 3, decoder)
    store = open_store(tmp_path / "kv", ram_bytes=0)
    with LayerLoader(
        decoder, prompt.layout, prompt.readers(store, store, {}), 0, len(prompt.layout), 2, threads
    ) as loader:
        for layer in range(asked):
            loader.synchronize(layer)
        assert len(open_files()) == 3
    assert loader_threads() == []
    del loader
    assert open_files() == []
    store.close()


@needs_proc
@pytest.mark.parametrize("threads", [0, 1, 4])
@pytest.mark.parametrize("damaged", [0, 2])
def test_damage_is_raised_and_nothing_left(decoder: Decoder, tmp_path: Path, threads: int, damaged: int) -> None:
    prompt = make_prompt([9, 8, 7], [0, 3, 40], ["disk"] * 3, decoder)
    store = open_store(tmp_path / "kv", ram_bytes=0)
    readers = prompt.readers(store, store, {})
    (file,) = (tmp_path / "kv").rglob(f"{damaged:08x}*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"\xff\x00\xff")
    with pytest.raises(ChunkReadError, match="checksum") as caught:
        load_all(decoder, prompt, readers, threads)
    assert caught.value.key == f"{damaged:08x}"
    assert loader_threads() == []
    del readers, caught
    assert open_files() == []
    store.close()


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_any_kind_reaches_whoever_waits(decoder: Decoder, threads: int) -> None:
    prompt = make_prompt([5, 6], [0, 40], ["ram"] * 2, decoder)
    readers = [_Watched(chunk) for chunk in prompt.chunks]
    readers[1].error = MemoryError("no room")
    with pytest.raises(MemoryError, match="no room"):
        load_all(decoder, prompt, readers, threads)
    assert loader_threads() == []


@pytest.fixture
def stored(make_engine: MakeEngine, tmp_path: Path) -> BlendEngine:
    engine = make_engine(tmp_path / "kv", strict=True, selector="hkvd", ram_bytes=0, load_threads=4)
    engine.add(CHUNKS)
    return engine


@pytest.mark.parametrize("selector", ["none", "hkvd"])
def test_the_pipeline_changes_no_answer(stored: BlendEngine, tmp_path: Path, selector: str) -> None:
    in_ram = open_store(tmp_path / "kv", 10**8)
    wanted = None
    for store, threads, ahead in ((stored._store, 1, 1), (stored._store, 4, 3), (in_ram, 2, 2), (in_ram, 4, 1)):
        settings = engine_settings(strict=True, selector=selector, load_threads=threads, prefetch_layers=ahead)
        with BlendEngine(stored.model, stored.tokenizer, **settings, store=store) as engine:
            logits = engine.prefill(PROMPT).logits
        wanted = logits if wanted is None else wanted
        assert torch.equal(logits, wanted)
    in_ram.close()
    assert loader_threads() == []


def test_the_report_says_what_was_loaded_and_from_where(stored: BlendEngine, tmp_path: Path) -> None:
    layer_bytes = stored.prefill(PROMPT).report.context_tokens * 2 * 2 * 8 * 4
    with BlendEngine(stored.model, stored.tokenizer, **engine_settings(strict=True), store=tmp_path / "kv") as engine:
        plain = engine.blend.replace(selector="none")
        prompt = BlendPrompt("t5", [*CHUNKS, Chunk("t9 t8", "new")], "t6 t7")
        first, second = engine.prefill(prompt, blend=plain).report, engine.prefill(prompt, blend=plain).report
        assert [chunk.tier for chunk in first.chunks] == ["disk"] * 4 + [None]
        assert [chunk.tier for chunk in second.chunks] == ["ram"] * 5
        assert second.load_bytes == 6 * second.context_tokens * 2 * 2 * 8 * 4
        # The layer before the check layer is computed in full.
        blend = engine.blend.replace(recompute_ratio=0.15, selector="hkvd")
        assert engine.prefill(PROMPT, blend=blend).report.load_bytes == 5 * layer_bytes
        assert 0 < second.load_s < second.ttft_s
        whole = engine.prefill(PROMPT, blend=engine.blend.replace(enabled=False)).report
        assert (whole.load_s, whole.load_bytes) == (0, 0)
        assert {chunk.tier for chunk in whole.chunks} == {None}


@needs_proc
def test_an_abandoned_stream_leaves_nothing(stored: BlendEngine) -> None:
    stream = stored.stream(PROMPT, 400)
    next(iter(stream))
    stream.close()
    stream.result()
    del stream
    assert loader_threads() == []
    assert open_files() == []


@pytest.mark.cuda
@pytest.mark.parametrize("threads", [0, 1, 4])
def test_layers_on_a_cuda_device_are_those_on_the_cpu(decoder: Decoder, threads: int) -> None:
    on_device = inspect_model(tiny_model("llama").to("cuda"))  # type: ignore[arg-type]
    prompt = make_prompt([300, 20, 170], [0, 3, 40], ["ram"] * 3, decoder)
    rows = prompt.layout.context_rows
    readers = [RamReader(chunk) for chunk in prompt.chunks]
    with LayerLoader(on_device, prompt.layout, readers, 0, len(prompt.layout) + 9, 2, threads) as loader:
        for layer in range(on_device.num_layers):
            loaded, wanted = loader.synchronize(layer), prompt.naive(decoder, layer)
            assert loaded.keys.device.type == "cuda"
            torch.testing.assert_close(loaded.keys[:, :, rows].cpu(), wanted.keys[:, :, rows])
            assert torch.equal(loaded.values[:, :, rows].cpu(), wanted.values[:, :, rows])
    assert 0 <= loader.wait_s < 60


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    pool = BufferPool(1 << 24)
    first = pool.empty((1, 4, 1000, 128), torch.float32)
    view, where = first[:, :2], first.data_ptr()
    del first
    other = pool.empty((1, 4, 1000, 128), torch.float32)
    assert other.data_ptr() != where
    view.fill_(7.0)
    del view
    # Of nearly the same size, and of another type.
    again = pool.empty((1, 4, 1020, 128), torch.float32)
    assert again.data_ptr() == where
    del again
    assert pool.empty((1, 4, 2000, 128), torch.bfloat16).data_ptr() == where


@given(st.lists(st.integers(1, 1 << 21), min_size=1, max_size=12), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_lent_at_the_same_time_does_not_overlap(sizes: list[int], dtype: torch.dtype) -> None:
    pool = BufferPool(8 << 20)
    for _ in range(2):
        tensors = [pool.empty((size,), dtype).fill_(number) for number, size in enumerate(sizes)]
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(tensors))
        del tensors


def test_threads() -> None:
    pool = BufferPool(4 << 20)

    def use(number: int) -> bool:
        tensor = pool.empty((1 << 18,), torch.float32).fill_(number)
        return bool((tensor == number).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(use, range(400)))
    gc.collect()
    assert pool.free_bytes <= 4 << 20


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_has_its_own() -> None:
    pool = BufferPool(4 << 20)
    tensor = pool.empty((1 << 18,), torch.float32).fill_(1.0)
    child = os.fork()
    if not child:
        tensor.fill_(2.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((tensor == 1.0).all())
