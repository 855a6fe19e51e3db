"""Packed KV against an element-by-element reference, the stated errors and the stated sizes."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.codec import QuantizedCodec, codec_names, make_codec, repack_layer, unpack_layer
from cacheblend_rag.kv import LayerKV
from tests.families import tiny_model, tiny_tokenizer, words

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def groups_of(length: int, most: int) -> list[range]:
    """The groups that a stretch of numbers is cut into: as few as `most` allows, of equal length but for the last."""
    count = math.ceil(length / most)
    size = math.ceil(length / count)
    return [range(begin, min(begin + size, length)) for begin in range(0, length, size)]


def half_up(number: float) -> np.float16:
    half = np.float16(number)
    return np.nextafter(half, np.float16(np.inf)) if float(half) < number else half


def naive(tensor: torch.Tensor, bits: int, group_size: int, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a tensor is unpacked to, and the step of each of its numbers; one group after the other."""
    levels = 2**bits - 1
    numbers = np.moveaxis(tensor.float().numpy(), axis, -1)
    unpacked, steps = np.empty_like(numbers), np.empty_like(numbers)
    for place in np.ndindex(numbers.shape[:-1]):
        row = numbers[place]
        for group in groups_of(len(row), group_size):
            least = -half_up(-float(row[group].min()))
            step = half_up(float((row[group].max() - np.float32(least)) / np.float32(levels)))
            for number in group:
                code = np.rint((row[number] - np.float32(least)) / np.float32(step)) if step else np.float32(0)
                code = min(max(code, np.float32(0)), np.float32(levels))
                unpacked[place][number] = code * np.float32(step) + np.float32(least)
                steps[place][number] = step
    back = [torch.from_numpy(np.ascontiguousarray(np.moveaxis(each, -1, axis))) for each in (unpacked, steps)]
    return back[0].to(tensor.dtype), back[1]


@st.composite
def tensors(draw: st.DrawFn) -> LayerKV:
    shape = tuple(draw(st.integers(1, most)) for most in (2, 70, 20))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(FLOATS))
    pair = []
    for _ in range(2):
        tensor = torch.randn(*shape, generator=numbers) * 10.0 ** draw(st.integers(-9, 9))
        tensor += draw(st.sampled_from([0.0, 0.0, 1.0, -300.25, 65_000.0, -1e9, 1e30]))
        special = draw(st.sampled_from([None, None, 0.0, 65_504.0, -65_504.0, 65_519.0, 1e38, math.inf, math.nan]))
        if special is not None:
            tensor[tuple(draw(st.integers(0, n - 1)) for n in shape)] = special
        if draw(st.booleans()):
            tensor[:, :, 0] = tensor[0, 0, 0].item()
        # A view as well, whose rows do not lie behind each other.
        pair.append(tensor.to(dtype) if draw(st.booleans()) else tensor.to(dtype).mT.contiguous().mT)
    return LayerKV(*pair)


# And those of a group of few numbers, so that small tensors have whole groups and rests.
CODECS = [
    QuantizedCodec("int8", bits=8, group_size=5, values_along="channel"),
    QuantizedCodec("int4", bits=4, group_size=4, values_along="token"),
    *map(make_codec, codec_names()),
]


@settings(max_examples=120)
@given(layer=tensors(), codec=st.sampled_from(CODECS))
def test_any_numbers_come_back_as_the_naive_reference_has_them_or_untouched(layer: LayerKV, codec: Any) -> None:
    packed = codec.pack(layer)
    back = codec.unpack(packed) if packed.codec == codec.name else unpack_layer(packed)
    assert packed.codec in (codec.name, "native")
    assert packed.nbytes == sum(part.nbytes for part in packed.parts.values())
    if packed.codec == "native":
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(layer, back, strict=True))
        return
    # What is packed is finite, before and after.
    for tensor in (*layer, *back, *(part for part in packed.parts.values() if part.is_floating_point())):
        assert bool(tensor.isfinite().all())
    for tensor, unpacked, axis in zip(layer, back, (1, 1 if codec.values_along == "channel" else 2), strict=True):
        assert (unpacked.dtype, unpacked.shape) == (tensor.dtype, tensor.shape)
        wanted, steps = naive(tensor, codec.bits, codec.group_size, axis)
        # Bit for bit: the same operations in the same precision.
        assert torch.equal(unpacked, wanted)
        error = (tensor.double() - unpacked.double()).abs()
        rounding = (tensor.double().abs() + error) * 2 * torch.finfo(tensor.dtype).eps
        assert bool((error <= steps / 2 + rounding).all())


def test_packing_by_another_codec() -> None:
    packed = {name: make_codec(name).pack(LayerKV(*torch.randn(2, 2, 70, 32))) for name in codec_names()}
    assert all(repack_layer(each, make_codec(name)) is each for name, each in packed.items())
    # What is narrower stays: the wider codec would only add its own error.
    assert repack_layer(packed["int4"], make_codec("int8")) is packed["int4"]
    assert repack_layer(packed["int8"], make_codec("int4")).codec == "int4"
    unpacked = repack_layer(packed["int4"], make_codec("native"))
    assert unpacked.codec == "native"
    assert all(map(torch.equal, unpack_layer(unpacked), unpack_layer(packed["int4"])))


CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((40, 33, 20, 17))]
PROMPT = BlendPrompt(words(4, 50), CHUNKS, words(6, 51))


def engine_with(store: Path | None = None, **settings: object) -> BlendEngine:
    config = engine_settings(strict=True, selector="hkvd", recompute_ratio=0.15, **settings)
    return BlendEngine(tiny_model("llama"), tiny_tokenizer(), **config, store=store)


def test_logits_move_no_more_than_the_bits_allow(tmp_path: Path) -> None:
    logits = {}
    for codec in codec_names():
        with engine_with(tmp_path / codec, ram_codec=codec, disk_codec=codec) as engine:
            engine.add(CHUNKS)
            result = engine.prefill(PROMPT)
            assert result.report.hits == 4
            logits[codec] = result.logits
        with engine_with(tmp_path / codec, ram_bytes=0) as engine:
            # From disk, under settings that name another codec: the same KV.
            result = engine.prefill(PROMPT)
            assert result.report.hits == 4
            assert torch.equal(result.logits, logits[codec])
    scale = logits["native"].norm()
    errors = {codec: float((logits[codec] - logits["native"]).norm() / scale) for codec in codec_names()}
    assert 0 < errors["int8"] < 0.05
    assert errors["int8"] < errors["int4"] < 0.5


def test_by_default_kv_on_disk_takes_8_bits_and_is_the_same_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_with(tmp_path / "native") as engine:
        engine.add(CHUNKS)
        native = engine.store.stats().disk_bytes
    monkeypatch.delenv("CACHEBLEND_DISK_CODEC")
    results = []
    for _ in range(2):
        with engine_with(tmp_path / "kv") as engine:
            engine.add(CHUNKS[:3])
            engine.prefill(PROMPT)
            engine.flush()
            results.append(engine.prefill(PROMPT))
            assert engine.store.stats().disk_bytes < 0.5 * native
    assert [each.report.hits for each in results] == [4, 4]
    assert torch.equal(results[0].logits, results[1].logits)
