"""What each codec takes in bytes, in time and in error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cacheblend_rag.codec import PackedKV, codec_names, make_codec, pack_kv, unpack_layer
from cacheblend_rag.kv import ChunkKV, LayerKV
from cacheblend_rag.lab.bench.setting import check_least, dtype_named
from cacheblend_rag.lab.bench.shapes import shape_config
from cacheblend_rag.lab.bench.times import seconds_of
from cacheblend_rag.store.chunkfile import encode_chunk

__all__ = ["CodecRow", "CodecSetting", "measure_codecs"]


@dataclass(frozen=True, slots=True)
class CodecSetting:
    """What is measured.

    Attributes
    ----------
    shape : str
        The model whose KV's shape is taken (`cacheblend_rag.lab.bench.SHAPES`).
    chunk_tokens : int
        Tokens of the chunk.
    dtype : {"float32", "float16", "bfloat16"}
        The dtype of its KV.
    repeats : int
        Rounds; each packs and unpacks the chunk once with every codec.
    seed : int
        The KV follows from it.
    """

    shape: str = "qwen2-0.5b"
    chunk_tokens: int = 512
    dtype: str = "float32"
    repeats: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, 1, "chunk_tokens", "repeats")
        dtype_named(self.dtype)


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


def measure_codecs(setting: CodecSetting, progress: Callable[[int, int], None] | None = None) -> list[CodecRow]:
    """Measure every codec on KV drawn from a normal distribution, one layer at a time as a prompt's chunks are loaded.

    Parameters
    ----------
    setting : CodecSetting
        What is measured.
    progress : callable, optional
        Called with the number of rounds done and of all.

    Returns
    -------
    list of CodecRow
        One for each codec.

    Raises
    ------
    ConfigError
        If the shape is unknown.
    """
    kv = _random_kv(setting)
    codecs = [make_codec(name) for name in codec_names()]
    packed = [pack_kv(kv, codec) for codec in codecs]
    times: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], object]) -> None:
        times.setdefault(what, []).append(seconds_of(work))

    # The first round warms up.
    for number in range(setting.repeats + 1):
        if number == 1:
            times.clear()
        timed("copy", lambda: _each(kv.layers, lambda layer: [tensor.clone() for tensor in layer]))
        for codec, each in zip(codecs, packed, strict=True):
            timed(f"pack {codec.name}", lambda codec=codec: _each(kv.layers, codec.pack))  # type: ignore[misc]
            timed(f"unpack {codec.name}", lambda each=each: _each(each.layers, unpack_layer))  # type: ignore[misc]
        if progress is not None:
            progress(number, setting.repeats)

    def speed(what: str) -> float:
        return kv.nbytes / min(times[what])

    float16_bytes = sum(tensor.numel() for layer in kv.layers for tensor in layer) * torch.float16.itemsize
    rows = []
    for codec, each in zip(codecs, packed, strict=True):
        file_bytes = encode_chunk("0" * 32, each).nbytes
        rms_error, max_error = _error(kv, each)
        rows.append(
            CodecRow(
                codec=codec.name,
                file_bytes=file_bytes,
                share_of_float16=file_bytes / float16_bytes,
                rms_error=rms_error,
                max_error=max_error,
                pack_bytes_per_s=speed(f"pack {codec.name}"),
                unpack_bytes_per_s=speed(f"unpack {codec.name}"),
                copy_bytes_per_s=speed("copy"),
            )
        )
    return rows


def _random_kv(setting: CodecSetting) -> ChunkKV:
    config = shape_config(setting.shape)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_key_value_heads, setting.chunk_tokens, head_dim)
    numbers = torch.Generator().manual_seed(setting.seed)
    dtype = dtype_named(setting.dtype)
    layers = [
        LayerKV(*(torch.randn(shape, generator=numbers).to(dtype) for _ in range(2)))
        for _ in range(config.num_hidden_layers)
    ]
    return ChunkKV(tuple(range(setting.chunk_tokens)), 0, layers)


def _each(layers: Sequence[object], work: Callable[..., object]) -> None:
    for layer in layers:
        work(layer)


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
