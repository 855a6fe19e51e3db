"""Codecs, which represent KV as it is, or in 8 or 4 bits a number on a grid for each small group of numbers.

The layout of quantised KV is KIVI's (Liu et al., arXiv 2402.02750): the keys of a few channels are large in every token, so keys
share a grid along a channel; values have no such channels, and at few bits they share a grid within a token.

KIVI keeps the most recent tokens in full precision, for a cache that grows and is read from its end. A stored chunk is whole
when it is packed, and a prompt's last tokens are never read from the store. So nothing is kept back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv import KV, ChunkKV, LayerKV

__all__ = [
    "EXACT",
    "Codec",
    "PackedKV",
    "PackedLayer",
    "QuantizedCodec",
    "TensorForm",
    "codec_names",
    "main_codec",
    "make_codec",
    "pack_kv",
    "repack_layer",
    "unpack_layer",
]

Axis = Literal["channel", "token"]

_QUANTIZABLE = {torch.float32, torch.float16, torch.bfloat16}


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor once it is unpacked."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the unpacked tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of a chunk's KV, as a codec packed it: the tensors by name, contiguous, in the order in which they are stored."""

    codec: str
    key_form: TensorForm
    value_form: TensorForm
    parts: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, codec: str, layer: LayerKV, parts: Mapping[str, torch.Tensor]) -> PackedLayer:
        """Return a layer that `codec` has packed into `parts`."""
        key_form, value_form = (TensorForm(tuple(tensor.shape), tensor.dtype) for tensor in layer)
        return cls(codec, key_form, value_form, parts)

    @property
    def nbytes(self) -> int:
        """Size of all parts in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def kv_bytes(self) -> int:
        """Size of the unpacked layer in bytes."""
        return self.key_form.nbytes + self.value_form.nbytes


class PackedKV(KV[PackedLayer]):
    """The KV of one chunk, packed layer by layer."""

    __slots__ = ()


def main_codec(codecs: Sequence[str]) -> str:
    """Return which codec most layers have; "native" where there are none."""
    return max(sorted(set(codecs)), key=codecs.count, default="native")


class Codec(Protocol):
    """A way to represent a layer's KV in fewer bytes."""

    @property
    def name(self) -> str:
        """The name under which settings and stored bytes know it."""

    def pack(self, layer: LayerKV) -> PackedLayer:
        """Pack one layer, ``(num_kv_heads, seq_len, head_dim)``; the result may share memory with it."""

    def unpack(self, packed: PackedLayer) -> LayerKV:
        """Return what was packed, in the dtypes it had; the result may share memory with the parts."""


@dataclass(frozen=True, slots=True)
class NativeCodec:
    """KV in the dtype that the model computed it in."""

    name: str

    def pack(self, layer: LayerKV) -> PackedLayer:
        parts = {"keys": layer.keys.contiguous(), "values": layer.values.contiguous()}
        return PackedLayer.of(self.name, layer, parts)

    def unpack(self, packed: PackedLayer) -> LayerKV:
        return LayerKV(packed.parts["keys"], packed.parts["values"])


@dataclass(frozen=True, slots=True)
class QuantizedCodec:
    """Asymmetric quantisation of `bits` a number, in groups of at most `group_size` along a channel or within a token.

    The numbers of a group lie between its least and its greatest, and each is stored as the number of the nearest of 2**bits
    evenly spaced points between them. A group is stored as those numbers and its grid: the least (rounded down) and the step
    (rounded up), both float16. A number is off by half a step at most, besides rounding to the dtype that is
    unpacked to. The step is the group's range, and float16's spacing at its least, over 2**bits - 1.

    Tensors are cut into groups of equal length, the last one shorter where that does not come out even. A layer is kept native
    where a tensor is empty, is not float32, float16 or bfloat16, or holds a number that is not finite or beyond float16.
    """

    name: str
    bits: Literal[4, 8]
    group_size: int
    values_along: Axis

    def pack(self, layer: LayerKV) -> PackedLayer:
        keys = self._quantize(layer.keys, "channel")
        values = self._quantize(layer.values, self.values_along)
        if keys is None or values is None:
            return NativeCodec("native").pack(layer)
        # Grids first: codes may end at an odd byte.
        parts = {"keys.grid": keys[0], "values.grid": values[0], "keys.codes": keys[1], "values.codes": values[1]}
        return PackedLayer.of(self.name, layer, parts)

    def unpack(self, packed: PackedLayer) -> LayerKV:
        parts = packed.parts
        return LayerKV(
            self._dequantize(parts["keys.grid"], parts["keys.codes"], packed.key_form, "channel"),
            self._dequantize(parts["values.grid"], parts["values.codes"], packed.value_form, self.values_along),
        )

    def _quantize(self, tensor: torch.Tensor, along: Axis) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return least and step of each group, ``(2, num_kv_heads, ...)``, and flat codes; None where there are none."""
        if tensor.dim() != 3 or tensor.numel() == 0 or tensor.dtype not in _QUANTIZABLE:
            return None
        axis = _axis(along)
        length = tensor.shape[axis]
        groups = -(-length // self.group_size)
        size = -(-length // groups)
        numbers = tensor.float()
        if groups * size > length:
            # The last number once more widens no range.
            last = numbers.narrow(axis, length - 1, 1)
            shape = list(tensor.shape)
            shape[axis] = groups * size - length
            numbers = torch.cat([numbers, last.expand(shape)], dim=axis)
        numbers = torch.unflatten(numbers, axis, (groups, size))
        levels = (1 << self.bits) - 1
        least = numbers.amin(axis + 1)
        if not bool(least.half().isfinite().all()):
            return None
        least = -_half_up(-least)
        step = _half_up((numbers.amax(axis + 1) - least.float()) / levels)
        greatest = least.float() + levels * step.float()
        # Where the greatest number is close to the end of its dtype, the grid may reach past it.
        if not bool((greatest <= torch.finfo(tensor.dtype).max).all()):
            return None
        width = torch.where(step == 0, 1, step.float())
        codes = (numbers - least.float().unsqueeze(axis + 1)).div_(width.unsqueeze(axis + 1)).round_().clamp_(0, levels)
        codes = codes.to(torch.uint8).flatten(axis, axis + 1).narrow(axis, 0, length)
        return torch.stack([least, step]), _pack_codes(codes, self.bits)

    def _dequantize(self, grid: torch.Tensor, codes: torch.Tensor, form: TensorForm, along: Axis) -> torch.Tensor:
        axis = _axis(along)
        length, groups = form.shape[axis], grid.shape[axis + 1]
        size = -(-length // groups)
        numbers = _unpack_codes(codes, self.bits, form.shape)
        least, step = grid.float().unsqueeze(axis + 2)
        before, after = form.shape[:axis], form.shape[axis + 1 :]
        full, rest = divmod(length, size)
        if rest == 0:
            numbers.view(*before, groups, size, *after).mul_(step).add_(least)
        else:
            # The last group is shorter than the others.
            for first, count, width in ((0, full, size), (full, 1, rest)):
                piece = numbers.narrow(axis, first * size, count * width).view(*before, count, width, *after)
                piece.mul_(step.narrow(axis, first, count)).add_(least.narrow(axis, first, count))
        return numbers.to(form.dtype)


EXACT = NativeCodec("exact")
"""Keeps KV as it is in every tier, whatever codec the tier keeps chunks in; settings cannot choose it."""

# Stored bytes name their codec: what a name stands for may change only in what `unpack` does not need to know.
_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        NativeCodec("native"),
        EXACT,
        QuantizedCodec("int8", bits=8, group_size=128, values_along="channel"),
        QuantizedCodec("int4", bits=4, group_size=32, values_along="token"),
    )
}


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs that can be chosen."""
    return tuple(name for name in _CODECS if name != EXACT.name)


def make_codec(name: str) -> Codec:
    """Return the codec of this name; ConfigError if there is none."""
    codec = _CODECS.get(name)
    if codec is None:
        raise ConfigError(f"unknown codec {name!r}; choose one of {', '.join(codec_names())}")
    return codec


def unpack_layer(packed: PackedLayer) -> LayerKV:
    """Return what was packed, by whatever codec."""
    return _CODECS[packed.codec].unpack(packed)


def repack_layer(packed: PackedLayer, codec: Codec) -> PackedLayer:
    """Return a layer packed by `codec`, or as it is if that is exact, or gains nothing; "native" unpacks it."""
    if packed.codec in (codec.name, EXACT.name):
        return packed
    repacked = codec.pack(unpack_layer(packed))
    return repacked if codec.name == "native" or repacked.nbytes < packed.nbytes else packed


def pack_kv(kv: ChunkKV | PackedKV, codec: Codec) -> PackedKV:
    """Return a chunk's KV as `codec` keeps it; see `repack_layer` for KV that is packed already."""
    if isinstance(kv, ChunkKV):
        layers = tuple(codec.pack(layer) for layer in kv.layers)
    else:
        layers = tuple(repack_layer(layer, codec) for layer in kv.layers)
    return PackedKV(kv.token_ids, kv.start, layers, kv.context)


def _axis(along: Axis) -> int:
    """Return the axis of ``(num_kv_heads, seq_len, head_dim)`` along which groups lie."""
    return 1 if along == "channel" else 2


def _half_up(numbers: torch.Tensor) -> torch.Tensor:
    """Return the least float16 that is no less than each number."""
    half = numbers.half()
    return torch.where(half.float() < numbers, half.nextafter(half.new_tensor(float("inf"))), half)


def _pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Put numbers of few bits into bytes, the first part in the lowest bits, so that both ways run over whole stretches."""
    lanes = 8 // bits
    flat = codes.flatten()
    each = -(-flat.numel() // lanes)
    padded = torch.cat([flat, flat.new_zeros(each * lanes - flat.numel())]).view(lanes, each)
    packed = padded[0].clone()
    for lane in range(1, lanes):
        packed |= padded[lane] << (bits * lane)
    return packed


def _unpack_codes(packed: torch.Tensor, bits: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return what `_pack_codes` packed, as float32."""
    lanes = 8 // bits
    each = packed.numel()
    numbers = torch.empty(lanes * each, dtype=torch.float32, device=packed.device)
    mask = (1 << bits) - 1
    for lane in range(lanes):
        shifted = packed if lane == 0 else packed >> (bits * lane)
        # The highest lane has nothing above it.
        numbers[lane * each : (lane + 1) * each] = shifted if lane == lanes - 1 else shifted & mask
    return numbers[: torch.Size(shape).numel()].view(shape)
