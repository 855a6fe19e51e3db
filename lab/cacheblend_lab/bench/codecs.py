"""Cost of each codec in bytes, in time and in error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cacheblend_lab.bench.runner import Bench, Say, in_rounds, say_nothing, seconds_of
from cacheblend_lab.bench.settings import CodecSetting
from cacheblend_lab.bench.shapes import shape_config
from cacheblend_rag.cli.output import say_bytes
from cacheblend_rag.codec import PackedKV, codec_names, make_codec, pack_kv, unpack_layer
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.store.chunkfile import encode_chunk

__all__ = ["CodecBench", "CodecRow"]


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One codec's figures.

    Attributes
    ----------
    codec : str
        Its name.
    file_bytes : int
        Size of the chunk's file, head included.
    share_of_float16 : float
        That over the bytes of the KV in float16.
    rms_error : float
        Root mean square of the error over that of the KV.
    max_error : float
        Greatest error over the root mean square of the KV.
    pack_bytes_per_s, unpack_bytes_per_s : float
        Speeds in the fastest round, in bytes of unpacked KV; what else runs on the machine only ever slows it.
    copy_bytes_per_s : float
        Speed of copying that KV in memory in the fastest of the same rounds.
    """

    codec: str
    file_bytes: int
    share_of_float16: float
    rms_error: float
    max_error: float
    pack_bytes_per_s: float
    unpack_bytes_per_s: float
    copy_bytes_per_s: float


class CodecBench(Bench[CodecSetting, CodecRow]):
    """KV drawn from a normal distribution, and every codec's form of it, handled a layer at a time as chunks are loaded."""

    def __init__(self, setting: CodecSetting) -> None:
        super().__init__(setting)
        self._kv = _random_kv(setting)
        self._codecs = {name: make_codec(name) for name in codec_names()}
        self._packed = {name: pack_kv(self._kv, codec) for name, codec in self._codecs.items()}

    def measure(self, say: Say = say_nothing) -> list[CodecRow]:
        works = [("copy", ""), *((work, name) for name in self._codecs for work in ("pack", "unpack"))]
        times = in_rounds(works, lambda work: seconds_of(lambda: self._work(*work)), self.setting.repeats, say=say)
        return [
            self._row(name, {work: self._kv.nbytes / min(each) for work, each in times.items()})
            for name in self._codecs
        ]

    def _work(self, work: str, codec: str) -> None:
        if work == "unpack":
            for packed in self._packed[codec].layers:
                unpack_layer(packed)
            return
        for layer in self._kv.layers:
            if work == "pack":
                self._codecs[codec].pack(layer)
            else:
                for tensor in layer:
                    tensor.clone()

    def _row(self, name: str, speeds: Mapping[tuple[str, str], float]) -> CodecRow:
        packed = self._packed[name]
        file_bytes = encode_chunk("0" * 32, packed).nbytes
        float16_bytes = sum(tensor.numel() for layer in self._kv.layers for tensor in layer) * torch.float16.itemsize
        rms_error, max_error = _error(self._kv, packed)
        return CodecRow(
            codec=name,
            file_bytes=file_bytes,
            share_of_float16=file_bytes / float16_bytes,
            rms_error=rms_error,
            max_error=max_error,
            pack_bytes_per_s=speeds["pack", name],
            unpack_bytes_per_s=speeds["unpack", name],
            copy_bytes_per_s=speeds["copy", ""],
        )

    def title(self, rows: Sequence[CodecRow]) -> str:
        asked = self.setting
        return (
            f"{asked.shape}, a chunk of {asked.chunk_tokens} tokens in {asked.dtype}, fastest of {asked.repeats} rounds; "
            f"copying runs at {say_bytes(rows[0].copy_bytes_per_s)}/s"
        )

    def cells(self, row: CodecRow) -> dict[str, Any]:
        return {
            "codec": row.codec,
            "file": say_bytes(row.file_bytes),
            "of float16": f"{row.share_of_float16:.3f}",
            "rms error": f"{row.rms_error:.4f}",
            "max error": f"{row.max_error:.4f}",
            "pack": f"{say_bytes(row.pack_bytes_per_s)}/s",
            "unpack": f"{say_bytes(row.unpack_bytes_per_s)}/s",
        }

    def about(self) -> dict[str, Any]:
        return {"model": f"random KV, {self.setting.shape}"}


def _random_kv(setting: CodecSetting) -> ChunkKV:
    config = shape_config(setting.shape)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_key_value_heads, setting.chunk_tokens, head_dim)
    numbers = torch.Generator().manual_seed(setting.seed)
    dtype = getattr(torch, setting.dtype)
    layers = [
        LayerKV(*(torch.randn(shape, generator=numbers).to(dtype) for _ in range(2)))
        for _ in range(config.num_hidden_layers)
    ]
    return ChunkKV(tuple(range(setting.chunk_tokens)), 0, layers)


def _error(kv: ChunkKV, packed: PackedKV) -> tuple[float, float]:
    def pairs() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for layer, each in zip(kv.layers, packed.layers, strict=True):
            for tensor, back in zip(layer, unpack_layer(each), strict=True):
                yield tensor.float(), back.float()

    squares = sum(float(tensor.square().sum()) for tensor, _ in pairs())
    error_squares = sum(float((tensor - back).square().sum()) for tensor, back in pairs())
    greatest = max(float((tensor - back).abs().max()) for tensor, back in pairs())
    count = sum(tensor.numel() for layer in kv.layers for tensor in layer)
    return (error_squares / squares) ** 0.5, greatest / (squares / count) ** 0.5
