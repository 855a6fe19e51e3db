"""Settings of each bench: a dataclass whose fields are the options of its command, and whose docstring is the command's help.

Nothing here imports torch, so that the command line is there at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_type_hints

import typer

from cacheblend_attachments.cli.calibrate import parse_ratios
from cacheblend_lab.cli.options import parse_capacities, parse_counts, parse_names
from cacheblend_rag.cli.options import ModelOption
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.tuning import Tuning

if TYPE_CHECKING:
    from cacheblend_lab.settings import EngineSettings

__all__ = [
    "DEVICE",
    "IDS_AT_ONCE",
    "NO_LIMIT",
    "SETTINGS",
    "AutoSetting",
    "BatchSetting",
    "BenchSetting",
    "CodecSetting",
    "EncodeSetting",
    "FindSetting",
    "IndexSetting",
    "LoadSetting",
    "ModelSetting",
    "PMLSetting",
    "PrefetchSetting",
    "RoundsSetting",
    "ServeSetting",
    "TPOTSetting",
    "TTFTSetting",
    "Written",
    "device_rate",
    "options_of",
]

NO_LIMIT = 2**63 - 1
"""Bytes that no measurement needs, for a RAM tier that keeps everything."""
DEVICE = "device"
"""The tier beside the model, from which nothing is loaded."""
IDS_AT_ONCE = 8
"""Number of ids that one lookup of the index asks for, the chunks of a prompt."""
_DTYPES = ("float32", "float16", "bfloat16")
_PREFILLS = ("full", "blend")


@dataclass(frozen=True)
class Written:
    """Form of an option on the command line, where that is not the value itself.

    Attributes
    ----------
    read : callable
        Makes the value of what was written.
    kind : type
        What typer reads.
    default : Any
        What is written for the field's default; None for its items, separated by commas.
    """

    read: Callable[[Any], Any]
    kind: type = str
    default: Any = None

    def default_of(self, value: Any) -> Any:
        """Return what is written for a field's default value."""
        return self.default if self.default is not None else ",".join(map(_item, value))


def _item(item: Any) -> str:
    if isinstance(item, tuple):
        return "x".join(map(str, item))
    return f"{item:g}" if isinstance(item, float) else str(item)


def parse_prompts(text: str) -> tuple[tuple[int, int], ...]:
    """Return prompts written like ``"1x32,6x512"``: chunks x tokens."""
    prompts = []
    for part in text.split(","):
        chunks, _, tokens = part.partition("x")
        try:
            prompts.append((int(chunks), int(tokens)))
        except ValueError:
            raise ConfigError(f"{part.strip()!r} is not a prompt; write chunks x tokens, as in 1x32,6x512") from None
    return tuple(prompts)


def parse_rates(text: str) -> tuple[float, ...]:
    """Return the numbers of a comma-separated list."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{text!r} holds something that is not a number; write rates like 0.5,1,2") from error


def device_rate(tier: str) -> float | None:
    """Return the bytes per second of the device that a name such as "200MB/s" emulates, or None for "ram" and "disk"."""
    if tier in ("ram", "disk"):
        return None
    try:
        rate = float(tier.removesuffix("MB/s"))
    except ValueError:
        rate = 0.0
    if not tier.endswith("MB/s") or not 0 < rate < float("inf"):
        raise ConfigError(f"tier {tier!r} is not measured here; give ram, disk, or a rate such as 200MB/s")
    return rate * 1e6


Shape = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="The model's shape: tiny, reference, smollm2-360m, qwen2-0.5b, gemma-3-1b, phi-3-mini-8-layers, llama-3.2-1b, "
        "llama-3.2-3b, qwen2.5-7b or llama-3.1-8b.",
    ),
]
Chunks = Annotated[int, typer.Option(min=1, help="Chunks in the prompt.")]
ChunkTokens = Annotated[int, typer.Option(min=1, help="Tokens of each chunk.")]
QuestionTokens = Annotated[int, typer.Option(min=1, help="Tokens of the question.")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds; each runs every method once. The median counts.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        exists=True,
        file_okay=False,
        help="Where the measured files are written for the time of the measurement; by default with other temporary files.",
    ),
]
Ratio = Annotated[float, typer.Option(min=0, max=1, help="The recompute ratio.")]
Dtype = Annotated[str, typer.Option(help="float32, float16 or bfloat16.")]


@dataclass(frozen=True)
class BenchSetting:
    """Settings of a bench; a value outside its option's range is refused with a ConfigError, as are those without meaning."""

    bench: ClassVar[str]
    """The class that measures, as ``module:name`` in `cacheblend_lab.bench`."""
    preparing: ClassVar[str]
    """Work that is done before the first round."""
    extra: ClassVar[str | None] = None
    """The extra of cacheblend-rag that brings what the bench needs besides."""

    def __post_init__(self) -> None:
        for name, (option, _) in options_of(type(self)).items():
            value = getattr(self, name)
            if option.min is not None and value is not None and value < option.min:
                raise ConfigError(f"{name}={value} must be at least {option.min}")
            if option.max is not None and value is not None and value > option.max:
                raise ConfigError(f"{name}={value} must be at most {option.max}")


def options_of(setting: type[BenchSetting]) -> dict[str, tuple[Any, Written | None]]:
    """Return typer's option of each field that has one, and how it is written where that is not the value itself."""
    hints = get_type_hints(setting, include_extras=True, localns={"EngineSettings": dict})
    found = {}
    # Fields by keyword alone, which many benches share, stand after a bench's own.
    for each in sorted(fields(setting), key=lambda each: bool(each.kw_only)):
        option, *written = getattr(hints[each.name], "__metadata__", (None,))
        if option is not None:
            found[each.name] = (option, written[0] if written else None)
    return found


@dataclass(frozen=True)
class RoundsSetting(BenchSetting):
    """Settings of every bench that runs methods in rounds."""

    repeats: Repeats = field(default=5, kw_only=True)


@dataclass(frozen=True)
class ModelSetting(RoundsSetting):
    """Further settings of every bench of a model of random weights.

    Attributes
    ----------
    dtype : str
        The dtype of the weights; "" for float32 on the CPU and bfloat16 elsewhere.
    """

    shape: Shape = "qwen2-0.5b"
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = field(default="cpu", kw_only=True)
    dtype: Annotated[
        str,
        typer.Option(help="float32, float16 or bfloat16; by default float32 on the CPU, else bfloat16."),
    ] = field(default="", kw_only=True)
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        import torch

        super().__post_init__()
        try:
            device = torch.empty(0, device=self.device).device.type
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"device {self.device!r} cannot be used: {reason}") from error
        if device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not measured; choose cpu, cuda or cuda:N")
        if not self.dtype:
            object.__setattr__(self, "dtype", "float32" if device == "cpu" else "bfloat16")
        check_dtype(self.dtype)

    @property
    def label(self) -> str:
        """The model, its dtype and its device."""
        return f"{self.shape}, {self.dtype} on {self.device}"

    def engine_settings(self, **settings: Any) -> EngineSettings:
        """Return an engine's settings under which every prompt is blended or refused, also where the environment says otherwise:
        without limits of RAM and disk, with KV as it was computed, and with no check of the model by itself.
        """
        from cacheblend_lab.settings import engine_settings

        named: dict[str, Any] = {
            "enabled": True,
            "dtype": self.dtype,
            "device": self.device,
            # KV in RAM comes from RAM: on a CUDA device, what was used once would else stay there.
            "device_bytes": 0,
            "ram_bytes": NO_LIMIT,
            "disk_bytes": NO_LIMIT,
            "disk_codec": "native",
            "self_check": False,
            "strict": True,
        }
        return engine_settings(**(named | settings))


def check_dtype(name: str) -> None:
    """Raise ConfigError if no model and no KV is measured in a dtype."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose one of {', '.join(_DTYPES)}")


@dataclass(frozen=True)
class TTFTSetting(ModelSetting):
    """Measure the time to the first token: full prefill, the model's own prefix cache, plain reuse and blend, in alternation.

    Full prefill is the model's own forward pass over the whole prompt; "prefix_cache" is its own cache of the first chunk, and
    "ready" one of all that stands before the question, which "of ready" compares with. "gapless" is plain reuse after a fixed
    head and with separators, whose KV is stored too; "of reuse" is how much of plain reuse's speed is left. "limit" is the
    speedup if computing rows were all that took time, "of limit" how much of it is there.
    """

    bench: ClassVar[str] = "ttft:TTFTBench"
    preparing: ClassVar[str] = "making the model and its chunks"
    chunks: Chunks = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: QuestionTokens = 32
    ratios: Annotated[
        tuple[float, ...],
        typer.Option(help="Recompute ratios, comma-separated; 0 is plain reuse."),
        Written(parse_ratios),
    ] = (0.0, 0.05, 0.15, 0.3)
    selectors: Annotated[
        tuple[str, ...],
        typer.Option(help="Selectors to measure at each ratio, comma-separated."),
        Written(parse_names),
    ] = ("hkvd",)
    tiers: Annotated[
        tuple[str, ...],
        typer.Option(
            "--tiers",
            "--tier",
            help="Where stored KV is read from, comma-separated: device (kept beside the model), ram, disk (the page cache is "
            "emptied of it before each run), or a rate such as 100MB/s for an emulated device.",
        ),
        Written(parse_names),
    ] = ("ram",)
    head_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of fixed text before the chunks, for a row of prompts without gaps.")
    ] = 0
    separator_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the engine's separator between the chunks, for that row.")
    ] = 0
    folder: Folder = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for tier in self.tiers or ("",):
            if tier != DEVICE:
                device_rate(tier)


@dataclass(frozen=True)
class TPOTSetting(ModelSetting):
    """Measure the time per output token and the KV held, by full prefill and blend, with all KV and with evicted KV (SnapKV).

    "faster" and "added" compare with the same method without eviction, round by round.
    """

    bench: ClassVar[str] = "tpot:TPOTBench"
    preparing: ClassVar[str] = "making the model and its chunks"
    chunks: Chunks = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: QuestionTokens = 32
    # A single token has no time between two tokens to measure.
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated.")] = 32
    capacities: Annotated[
        tuple[int | float, ...],
        typer.Option(help="Context KV that is kept, comma-separated: a share (0.25) or a number of tokens (512)."),
        Written(parse_capacities),
    ] = (0.25,)
    methods: Annotated[
        tuple[str, ...],
        typer.Option(help="How the prompt is prefilled, comma-separated: full, blend."),
        Written(parse_names),
    ] = _PREFILLS
    ratio: Annotated[float, typer.Option(help="Recompute ratio of the blend.")] = 0.15
    selector: Annotated[str, typer.Option(help="Selector of the blend.")] = "hkvd"

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.methods or ("",):
            if method not in _PREFILLS:
                raise ConfigError(f"method {method!r} is not measured; choose among {', '.join(_PREFILLS)}")


@dataclass(frozen=True)
class PMLSetting(ModelSetting):
    """Measure the time to the first token of a prompt made of schema modules, against the model's own prefill of it."""

    bench: ClassVar[str] = "pml:PMLBench"
    preparing: ClassVar[str] = "making the model and loading the schema"
    modules: Annotated[int, typer.Option(min=1, help="Modules of the schema, all of them imported.")] = 10
    module_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each module.")] = 500
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that are not the schema's.")] = 50
    argument_tokens: Annotated[
        int, typer.Option(min=0, help="How many of them are the argument of a parameter in the first module.")
    ] = 10
    selectors: Annotated[
        tuple[str, ...],
        typer.Option(help="Selectors, comma-separated; none recomputes nothing, as in Prompt Cache."),
        Written(parse_names),
    ] = ("none",)
    ratio: Annotated[float, typer.Option(min=0, max=1, help="Recompute ratio of the other selectors.")] = 0.15
    tier: Annotated[str, typer.Option(help="ram, or disk (the page cache is emptied of it before each run).")] = "ram"
    folder: Folder = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.argument_tokens >= min(self.new_tokens, self.module_tokens):
            raise ConfigError(
                f"argument_tokens={self.argument_tokens} must be fewer than the {self.new_tokens} new tokens, and than the "
                f"{self.module_tokens} of a module"
            )
        if self.tier not in ("ram", "disk"):
            raise ConfigError(f"tier {self.tier!r} is unknown; give ram or disk")


@dataclass(frozen=True)
class LoadSetting(RoundsSetting):
    """Measure how fast the loader reads, checks and assembles stored KV, beside plain reads of the same files, in alternation.

    The page cache is emptied of the files before each run.
    """

    bench: ClassVar[str] = "load:LoadBench"
    preparing: ClassVar[str] = "making the files"
    shape: Shape = "qwen2-0.5b"
    chunks: Annotated[int, typer.Option(min=1, help="Chunks.")] = 6
    chunk_tokens: ChunkTokens = 512
    threads: Annotated[
        tuple[int, ...],
        typer.Option(help="Numbers of loader threads, comma-separated; 0 loads in the calling thread."),
        Written(lambda text: parse_counts(text, "0,1,2,4")),
    ] = (0, 1, 2, 4)
    # Layers that the loader may be ahead.
    ahead: int = Tuning().prefetch_layers
    dtype: Dtype = "float32"
    folder: Folder = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dtype(self.dtype)
        if not self.threads or min(self.threads) < 0:
            raise ConfigError(f"threads={self.threads} must be numbers of threads; 0 is the loader without any")


@dataclass(frozen=True)
class PrefetchSetting(ModelSetting):
    """Measure the time to the first token after a reranker, when the candidates' KV is on disk: read when the prompt comes,
    prefetched while the reranker works, or in RAM before.

    The reranker waits, and computes nothing. The page cache is emptied of the files before each run.
    """

    bench: ClassVar[str] = "prefetch:PrefetchBench"
    preparing: ClassVar[str] = "making the model and its chunks"
    candidates: Annotated[int, typer.Option(min=1, help="Number of retrieved chunks.")] = 12
    chunks: Annotated[int, typer.Option(min=1, help="How many of them the reranker keeps.")] = 6
    chunk_tokens: ChunkTokens = 512
    question_tokens: QuestionTokens = 32
    reranker_s: Annotated[
        float,
        typer.Option("--reranker-ms", min=0, help="Milliseconds that the reranker takes."),
        Written(lambda milliseconds: milliseconds / 1000, float, 200),
    ] = 0.2
    ratio: Ratio = 0.15
    selector: Annotated[str, typer.Option(help="The selector.")] = "hkvd"
    folder: Folder = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks > self.candidates:
            raise ConfigError(f"chunks={self.chunks} cannot be chosen from candidates={self.candidates}")
        if self.reranker_s > 60:
            raise ConfigError(f"reranker_s={self.reranker_s} must be seconds, from 0 to 60")


@dataclass(frozen=True)
class EncodeSetting(ModelSetting):
    """Measure how fast chunks are added, into RAM and into a folder, at once and one by one, in alternation.

    They are compared with the model's own batched forward over the same chunks, and with encoding each of them once: "of forward"
    and "of once" are the times over those of the same round.
    """

    bench: ClassVar[str] = "encode:EncodeBench"
    preparing: ClassVar[str] = "making the model and its chunks"
    chunks: Annotated[int, typer.Option(min=1, help="Chunks to add.")] = 64
    chunk_tokens: ChunkTokens = 512
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the preamble; 1 is a BOS alone.")] = 1
    batch_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens encoded in one batch.")] = 4096
    document_chunks: Annotated[int, typer.Option(min=0, help="Chunks of a document; 0: they are of none.")] = 0
    folder: Folder = None
    repeats: Repeats = field(default=3, kw_only=True)


@dataclass(frozen=True)
class CodecSetting(RoundsSetting):
    """Measure what each codec makes of a chunk's KV: bytes of its file, error, and speed beside copying the KV in memory.

    The KV is drawn from a normal distribution; `eval reference --codecs` says what a codec does to answers.
    """

    bench: ClassVar[str] = "codecs:CodecBench"
    preparing: ClassVar[str] = "packing"
    shape: Shape = "qwen2-0.5b"
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the chunk.")] = 512
    dtype: Dtype = "float32"
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; each runs every codec once. The fastest counts.")] = (
        field(default=9, kw_only=True)
    )
    seed: Annotated[int, typer.Option(help="Seed of the KV.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_dtype(self.dtype)


@dataclass(frozen=True)
class IndexSetting(BenchSetting):
    """Measure the store's index by its number of entries: opening, looking up the chunks of a prompt, memory.

    Each store is measured in a process of its own, with its index in the page cache. Its chunk files are not written.
    """

    bench: ClassVar[str] = "index:IndexBench"
    preparing: ClassVar[str] = "making the stores"
    entries: Annotated[
        tuple[int, ...],
        typer.Option(help="Entries of each store, two a chunk, comma-separated."),
        Written(parse_counts),
    ] = (10_000, 100_000, 1_000_000)
    lookups: Annotated[int, typer.Option(min=100, help="Lookups of 8 random ids that are timed.")] = 10_000
    folder: Annotated[
        Path | None, typer.Option(file_okay=False, help="Create the stores in this empty folder, and keep them.")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.entries or min(self.entries) < 2 * IDS_AT_ONCE:
            raise ConfigError(
                f"entries {list(self.entries)} must each be at least {2 * IDS_AT_ONCE}, those of the chunks of one lookup"
            )
        if self.folder is not None and self.folder.exists() and any(self.folder.iterdir()):
            raise ConfigError(f"folder {self.folder} is not empty; give a new one")


@dataclass(frozen=True)
class BatchSetting(RoundsSetting):
    """Measure the throughput of LangChain's ``batch`` against ``invoke`` for one prompt after the other.

    All chunks are stored. "faster" compares round by round.
    """

    bench: ClassVar[str] = "batch:BatchBench"
    preparing: ClassVar[str] = "loading the model and storing the chunks"
    extra: ClassVar[str | None] = "langchain"
    model: ModelOption = "reference"
    prompts: Annotated[int, typer.Option(min=2, help="Prompts of the batch.")] = 16
    chunks: Annotated[int, typer.Option(min=1, help="Stored chunks in each prompt.")] = 6
    # A chunk is recognised by its first characters, and a question should not look like the next one.
    chunk_tokens: Annotated[int, typer.Option(min=16, help="About how many tokens each chunk has.")] = 64
    question_tokens: Annotated[int, typer.Option(min=4, help="About how many tokens each question has.")] = 16
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 32
    ratio: Annotated[float, typer.Option(help="Recompute ratio.")] = 0.15
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0


@dataclass(frozen=True)
class FindSetting(BenchSetting):
    """Measure what a prompt waits while stored chunks are looked for in it.

    The prompts hold 0 to 16 chunks and as many with one character changed, between other text.
    """

    bench: ClassVar[str] = "find:FindBench"
    preparing: ClassVar[str] = "making the texts"
    chunks: Annotated[int, typer.Option(min=16, help="Stored chunks.")] = 100_000
    # For a 99th percentile.
    prompts: Annotated[int, typer.Option(min=100, help="Number of prompts to search.")] = 500
    prompt_chars: Annotated[
        int, typer.Option(min=1, help="Characters of each prompt, at least; 36000 are 8000 tokens.")
    ] = 36_000
    heading: Annotated[bool, typer.Option("--heading", help="Begin all chunks with the same line.")] = False
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0


@dataclass(frozen=True)
class AutoSetting(ModelSetting):
    """Compare AutoRatio with full prefill and fixed ratios, over tiers and prompts, in alternation.

    "regret" is how much longer auto took than the best setting whose ratio is not under the quality floor; "of the choice" is how
    much longer what it chose took when asked for as a fixed setting: 0 where it chose the best one.
    """

    bench: ClassVar[str] = "auto:AutoBench"
    preparing: ClassVar[str] = "making the model"
    tiers: Annotated[
        tuple[str, ...],
        typer.Option(help="ram, disk, or a rate such as 200MB/s for an emulated device; comma-separated."),
        Written(parse_names),
    ] = ("ram", "disk", "200MB/s")
    prompts: Annotated[
        tuple[tuple[int, int], ...],
        typer.Option(help="Prompts as chunks x tokens, comma-separated."),
        Written(parse_prompts),
    ] = ((1, 32), (2, 128), (6, 256), (6, 512))
    question_tokens: QuestionTokens = 32
    ratios: Annotated[
        tuple[float, ...],
        typer.Option(help="Fixed ratios to compare with, comma-separated."),
        Written(parse_ratios),
    ] = (0.15, 0.3, 0.5, 0.8)
    quality_ratio: Annotated[float, typer.Option(help="The quality floor: no smaller ratio is compared.")] = 0.15
    profile_s: Annotated[
        float,
        typer.Option("--profile-seconds", min=0.1, help="About how long each tier's profile may take."),
    ] = 20.0
    repeats: Repeats = field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tiers or not self.prompts:
            raise ConfigError("give at least one tier and one prompt to measure")
        for tier in self.tiers:
            device_rate(tier)
        for chunks, tokens in self.prompts:
            if chunks < 1 or tokens < 1:
                raise ConfigError(f"a prompt of {chunks} chunks of {tokens} tokens has none; give at least 1 of each")


@dataclass(frozen=True)
class ServeSetting(BenchSetting):
    """Measure a server under load: Poisson arrivals, prompts of chunks that are drawn from a corpus by Zipf's law.

    Any OpenAI-compatible server can be asked, with the key in OPENAI_API_KEY. With --prompts documents it must be one of this
    package, which gets the corpus first and then names alone; with --prompts text the chunks stand in the prompt.
    """

    bench: ClassVar[str] = "serve:ServeBench"
    preparing: ClassVar[str] = "handing the corpus over"
    url: Annotated[str, typer.Option(help="The server's address, without /v1.")] = "http://127.0.0.1:8000"
    model: Annotated[str | None, typer.Option(help="The model; by default the first that the server lists.")] = None
    prompts: Annotated[str, typer.Option(help="What prompts have: documents (names) or text.")] = "documents"
    rates: Annotated[
        tuple[float, ...], typer.Option(help="Requests per second, comma-separated."), Written(parse_rates)
    ] = (0.5, 1.0, 2.0, 4.0)
    seconds: Annotated[float, typer.Option(min=1, help="How long requests arrive at each rate.")] = 60.0
    corpus: Annotated[int, typer.Option(min=1, help="Chunks of the corpus.")] = 200
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of a prompt.")] = 10
    chunk_words: Annotated[int, typer.Option(min=4, help="Words of a chunk, each about 1.3 tokens.")] = 112
    zipf: Annotated[float, typer.Option(min=0, help="Zipf exponent of the chunk requests; 0 is uniform.")] = 1.0
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer, whether or not the model ends it (ignore_eos).")
    ] = 32
    seed: Annotated[int, typer.Option(help="Seed of corpus and arrivals.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts not in ("documents", "text"):
            raise ConfigError(f"prompts={self.prompts!r} is not known; give documents or text")
        if self.chunks > self.corpus:
            raise ConfigError(f"a prompt of {self.chunks} chunks cannot be drawn from a corpus of {self.corpus}")
        if not self.rates or min(self.rates) <= 0:
            raise ConfigError(f"rates {list(self.rates)} must be above 0")


SETTINGS: dict[str, type[BenchSetting]] = {
    "ttft": TTFTSetting,
    "tpot": TPOTSetting,
    "pml": PMLSetting,
    "load": LoadSetting,
    "prefetch": PrefetchSetting,
    "encode": EncodeSetting,
    "codecs": CodecSetting,
    "index": IndexSetting,
    "batch": BatchSetting,
    "find": FindSetting,
    "auto": AutoSetting,
    "serve": ServeSetting,
}
"""Every bench by the name of its command."""
