"""One model in llama.cpp, with a context whose cells sequences share."""

from __future__ import annotations

import ctypes
import hashlib
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

import llama_cpp
import numpy as np
import torch
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from cacheblend_gguf.decoding import Decoding
from cacheblend_gguf.files import parts_of
from cacheblend_gguf.state import join_state, split_state
from cacheblend_gguf.tokenizer import LlamaTokenizer
from cacheblend_rag.config import SettingsBase, warn_of_unknown_variables
from cacheblend_rag.encode import shared_length
from cacheblend_rag.engine.backend import Scheduler
from cacheblend_rag.errors import CacheBlendError, ConfigError, UnsupportedModelError
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.prefixes import PrefixCache, drop_oldest

__all__ = ["HEAD_CELLS", "Llama", "LlamaOptions", "quiet"]

_Cells: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"
_Logits: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"
_KVType = Literal["f16", "f32", "bf16", "q8_0", "q4_0"]
# ggml's numbers of them.
_KV_TYPES: dict[_KVType, int] = {"f16": 1, "f32": 0, "bf16": 30, "q8_0": 8, "q4_0": 2}
_DEFAULT_TOKENS = 8192
_PREFIX = "CACHEBLEND_GGUF_"
_BATCH = 2048
# Cells beside a prompt's, of its head while that is encoded.
HEAD_CELLS = 512
_READ_BYTES = 1 << 24
# The level of errors in ggml's log.
_ERROR = 4
_NONE = np.empty(0, np.int64)

# Sequences that no answer has: where chunks are encoded, and where states are put in and out.
_ENCODING, _PASSING, _FIRST_ANSWER = 0, 1, 2


class LlamaOptions(SettingsBase):
    """How llama.cpp loads a model, under the names of llama-cpp-python.

    Every option can also be set by an environment variable, its name in capitals after ``CACHEBLEND_GGUF_``, as in
    ``CACHEBLEND_GGUF_N_CTX=4096``. An argument wins over the environment.

    Parameters
    ----------
    n_ctx : int, optional
        Maximum tokens of a prompt and its answer; by default 8192, or as many as the model was trained on, as 0 is.
    n_threads : int, optional
        Threads that compute; by default as many as torch has.
    n_gpu_layers : int
        Layers on the GPU, where llama.cpp was built for one; all by default.
    n_seq_max : int
        Maximum answers that are decoded together.
    type_k, type_v : str
        What keys and values are kept in: "f16", "f32", "bf16", "q8_0" or "q4_0".
    """

    model_config = SettingsConfigDict(env_prefix=_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    n_ctx: int | None = Field(default=None, ge=0)
    n_threads: int | None = Field(default=None, ge=1)
    n_gpu_layers: int = -1
    n_seq_max: int = Field(default=16, ge=1, le=64)
    type_k: _KVType = "f16"
    type_v: _KVType = "f16"

    def __init__(self, **values: Any) -> None:
        warn_of_unknown_variables(_PREFIX)
        super().__init__(**values)


class Llama:
    """A GGUF model and its cells: one computation at a time, by who holds the engine's scheduler.

    `UnsupportedModelError` if its KV cannot be moved or taken apart: that of recurrent and hybrid models.
    """

    def __init__(self, path: Path, options: LlamaOptions) -> None:
        self.path, self.options = path, options
        llama_cpp.llama_backend_init()
        quiet()
        loading = llama_cpp.llama_model_default_params()
        loading.n_gpu_layers = options.n_gpu_layers
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), loading)
        if not self._model:
            raise ConfigError(
                f"llama.cpp {llama_cpp.__version__} cannot load {path} ({_why()}); download it again, or another file"
            )
        self.tokenizer = LlamaTokenizer(path, self._model)
        trained = int(llama_cpp.llama_model_n_ctx_train(self._model))
        # Maximum tokens of a prompt and its answer, and what makes it larger, where the model was trained on more.
        self.window = min(_DEFAULT_TOKENS if options.n_ctx is None else options.n_ctx or trained, trained)
        self.window_hint = f", or open the file with a larger n_ctx, up to {trained}" if self.window < trained else ""
        self._context = self._open_context()
        self._memory = llama_cpp.llama_get_memory(self._context)
        # Tokens that all sequences together can have.
        self.cells = int(llama_cpp.llama_n_ctx(self._context))
        self._sliding = int(llama_cpp.llama_model_n_swa(self._model))
        self._free = list(range(_FIRST_ANSWER, _FIRST_ANSWER + 2 * options.n_seq_max))
        self._answers: set[int] = set()
        # A number for each cell of each answer and of each earlier prompt: who begins as another one shares its numbers. Of an
        # answer under way they are as many as it will have at most.
        self._held: dict[int, _Cells] = {}
        self._numbers = 0
        # What the engines over this model keep of earlier prompts, each in a sequence; what of these is not wanted any more.
        self.kept: WeakSet[PrefixCache] = WeakSet()
        self._cuts: deque[tuple[int, int]] = deque()
        # What the encoding sequence holds.
        self._read: tuple[int, ...] = ()
        if llama_cpp.llama_model_has_encoder(self._model) or not llama_cpp.llama_memory_can_shift(self._memory):
            raise UnsupportedModelError(
                f"the KV of {path.name} cannot be moved to another position (a recurrent, hybrid or encoder model), so its "
                "chunks cannot be stored; use llama.cpp alone for it"
            )
        self.scheduler = Scheduler()
        self.decoding = Decoding(self)
        # This thread's workers end with it.
        with self.scheduler:
            self._look()

    def _open_context(self) -> Any:
        asked = llama_cpp.llama_context_default_params()
        asked.n_ctx = self.window + HEAD_CELLS
        asked.n_batch = _BATCH
        asked.n_seq_max = _FIRST_ANSWER + 2 * self.options.n_seq_max
        asked.kv_unified = True
        # Cells that slid out of the window are wanted when a chunk is moved.
        asked.swa_full = True
        # Without it values are not kept by token, and cannot have 8 or 4 bits.
        asked.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        asked.type_k, asked.type_v = _KV_TYPES[self.options.type_k], _KV_TYPES[self.options.type_v]
        asked.n_threads = asked.n_threads_batch = self.options.n_threads or torch.get_num_threads()
        context = llama_cpp.llama_init_from_model(self._model, asked)
        if not context:
            raise ConfigError(
                f"llama.cpp cannot make a context of {self.window} tokens for {self.path.name} with {self.options!r}; give a "
                "smaller n_ctx, or other types"
            )
        return context

    def _look(self) -> None:
        """Find out the form of the KV, as two tokens have it, and see that what is put back is what was taken."""
        ids = [1, 2]
        self.decode(ids, 0, _ENCODING)
        self.form, layers = split_state(self._state(_ENCODING, 0, 2), 0, 2)
        self.row_bytes = sum(rows.nbytes for layer in self.form.layers for rows in layer)
        self.remove(_ENCODING)
        self.put(layers, 0, 0, _ENCODING)
        form, again = split_state(self._state(_ENCODING, 0, 2), 0, 2)
        self.remove(_ENCODING)
        if form != self.form or not all(
            torch.equal(*pair) for both in zip(layers, again, strict=True) for pair in zip(*both, strict=True)
        ):
            raise UnsupportedModelError(
                f"llama.cpp {llama_cpp.__version__} does not give back the KV of {self.path.name} that it was given, so its "
                "chunks cannot be stored"
            )

    def digest(self) -> str:
        """Return the digest of the files and of all else that their KV depends on: 32 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=16)
        for part in parts_of(self.path):
            with part.open("rb") as file:
                while data := file.read(_READ_BYTES):
                    digest.update(data)
        digest.update(f"{self.form}|{llama_cpp.__version__}".encode())
        return digest.hexdigest()

    # Sequences

    def _make_room(self, cells: int, read: int, shared: _Cells = _NONE) -> bool:
        """Whether that many cells, and those of `shared`, fit beside the answers under way and so many tokens that are read for
        chunks; drop earlier prompts for them.

        What is alone always fits.
        """
        self._apply_cuts()
        limit = self.cells - max(read, HEAD_CELLS) - cells
        if self._answers and _count(shared, *(self._held[each] for each in self._answers)) > limit:
            return False
        while _count(shared, *self._held.values()) > limit and self._drop_oldest():
            pass
        return True

    def _drop_oldest(self) -> bool:
        """Drop the earlier prompt that was used least recently; return whether there was one."""
        is_dropped = drop_oldest(self.kept)
        self._apply_cuts()
        return is_dropped

    def begin(self, cells: int, source: int | None = None, rows: int = 0) -> int | None:
        """Return a sequence for an answer that takes that many cells at most; None if there is no room for it now.

        It begins with the first `rows` of an earlier prompt, the sequence `source`, if that is given; None if these are gone.
        """
        self._apply_cuts()
        is_gone = source is not None and len(self._held.get(source, _NONE)) < rows
        if is_gone or len(self._answers) >= self.options.n_seq_max:
            return None
        while not self._free:
            self._drop_oldest()
        sequence = self._free.pop()
        shared = _NONE if source is None else self._held[source][:rows]
        if source is not None:
            # Before room is made: these cells stay, whatever becomes of the earlier prompt.
            llama_cpp.llama_memory_seq_cp(self._memory, source, sequence, 0, rows)
        if not self._make_room(cells - rows, len(self._read), shared):
            # What is read for chunks is read again.
            self.keep_reading(0)
            if not self._make_room(cells - rows, 0, shared):
                self.remove(sequence)
                self._free.append(sequence)
                return None
        self._held[sequence] = np.append(shared, np.arange(cells - rows) + self._numbers)
        self._numbers += cells - rows
        self._answers.add(sequence)
        return sequence

    def keep(self, sequence: int, rows: int) -> None:
        """Have an answer's sequence stay as an earlier prompt of that many rows, which is all that it has."""
        self._answers.remove(sequence)
        self._held[sequence] = self._held[sequence][:rows]

    def end(self, sequence: int) -> None:
        """Free an answer's sequence."""
        self._answers.discard(sequence)
        self._cuts.append((sequence, 0))
        self._apply_cuts()

    def cut(self, sequence: int, rows: int) -> int:
        """Have the sequence of an earlier prompt cut to its first rows, or freed, before anything else is computed.

        Any thread may call it.
        """
        self._cuts.append((sequence, rows))
        return sequence

    def _apply_cuts(self) -> None:
        while self._cuts:
            sequence, rows = self._cuts.popleft()
            self.remove(sequence, rows)
            self._held[sequence] = self._held[sequence][:rows]
            if not rows:
                del self._held[sequence]
                self._free.append(sequence)

    def remove(self, sequence: int, first: int = -1) -> None:
        """Remove a sequence's tokens from position `first` on, all by default."""
        if self._context is not None:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, first, -1)

    def read(self, ids: tuple[int, ...], most: int) -> int:
        """Have the encoding sequence hold these tokens, of which so many are computed at most; return how many it holds.

        None are computed, and 0 is returned, while answers have the cells for them.
        """
        if not self._make_room(0, len(ids)):
            return 0
        self.keep_reading(self.known(ids))
        begin = len(self._read)
        part = ids[begin : begin + most]
        self.decode(part, begin, _ENCODING)
        self._read += part
        return len(self._read)

    def known(self, ids: Sequence[int]) -> int:
        """Return how many of these tokens the encoding sequence holds."""
        return shared_length(self._read, ids)

    def keep_reading(self, count: int) -> None:
        """Keep the first tokens that the encoding sequence holds, and free the cells of the others."""
        self._read = self._read[:count]
        self.remove(_ENCODING, count)

    def take(self, first: int, count: int, sequence: int = _ENCODING) -> list[LayerKV]:
        """Return the KV of tokens of a sequence, by default the encoding one, ``(1, count, width)`` of each layer."""
        # Of more than a window the state of a sliding layer has the last ones only.
        step = min(count, self._sliding) if self._sliding else count
        parts = []
        for begin in range(first, first + count, step):
            length = min(step, first + count - begin)
            parts.append(split_state(self._state(sequence, begin, begin + length), begin, length)[1])
        if len(parts) == 1:
            return parts[0]
        return [
            LayerKV(*(torch.cat([part[number][side] for part in parts], dim=1) for side in (0, 1)))
            for number in range(len(parts[0]))
        ]

    def put(self, layers: Sequence[LayerKV], encoded_at: int, position: int, sequence: int) -> None:
        """Append tokens to a sequence, whose KV was computed at another position; llama.cpp turns the keys."""
        self._check_open()
        state = join_state(self.form, layers, encoded_at)
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if llama_cpp.llama_state_seq_set_data(self._context, data, len(state), _PASSING) != len(state):
            self.remove(_PASSING)
            raise CacheBlendError(f"llama.cpp has no room for {layers[0].keys.shape[1]} more tokens")
        if position != encoded_at:
            llama_cpp.llama_memory_seq_add(self._memory, _PASSING, -1, -1, position - encoded_at)
        llama_cpp.llama_memory_seq_cp(self._memory, _PASSING, sequence, -1, -1)
        self.remove(_PASSING)

    def _state(self, sequence: int, first: int, stop: int) -> bytes:
        self._check_open()
        llama_cpp.llama_memory_seq_cp(self._memory, sequence, _PASSING, first, stop)
        size = llama_cpp.llama_state_seq_get_size(self._context, _PASSING)
        data = (ctypes.c_uint8 * size)()
        written = llama_cpp.llama_state_seq_get_data(self._context, data, size, _PASSING)
        self.remove(_PASSING)
        return bytes(memoryview(data)[:written])

    # Computing

    def decode(self, ids: Sequence[int], first: int, sequence: int, count: int = 0) -> list[_Logits]:
        """Compute tokens of one sequence from position `first` on; return the logits of so many last ones, ``(vocab,)`` each."""
        found = []
        for begin in range(0, len(ids), _BATCH):
            part = enumerate(ids[begin : begin + _BATCH], begin)
            found += self.step([(id, first + place, sequence, place >= len(ids) - count) for place, id in part])
        return found

    def step(self, tokens: Sequence[tuple[int, int, int, bool]]) -> list[_Logits]:
        """Compute tokens, each an id, a position, a sequence and whether its logits are wanted; return those, ``(vocab,)`` each.

        There are no more than a batch of them.
        """
        self._check_open()
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        try:
            for number, (id, position, sequence, is_wanted) in enumerate(tokens):
                batch.token[number], batch.pos[number] = id, position
                batch.n_seq_id[number], batch.seq_id[number][0] = 1, sequence
                batch.logits[number] = is_wanted
            batch.n_tokens = len(tokens)
            status = llama_cpp.llama_decode(self._context, batch)
            if status:
                raise CacheBlendError(f"llama.cpp could not compute {len(tokens)} tokens (status {status})")
        finally:
            llama_cpp.llama_batch_free(batch)
        return [
            np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(self._context, number), shape=(len(self.tokenizer),)
            ).copy()
            for number, token in enumerate(tokens)
            if token[3]
        ]

    def _check_open(self) -> None:
        # llama.cpp ends the process where it is given a context that is gone.
        if self._context is None:
            raise ConfigError("this engine was closed while this was under way; make a new one")

    def close(self) -> None:
        """Free the model and its context; what computes from then on fails."""
        if self._context is not None:
            self.tokenizer.close()
            llama_cpp.llama_free(self._context)
            llama_cpp.llama_model_free(self._model)
            self._context = self._model = None


def _count(*cells: _Cells) -> int:
    """Return how many cells several sequences have together."""
    return len(np.unique(np.concatenate(cells)))


_errors: list[str] = []


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # llama_cpp is not here where types are checked
def _note(level: int, text: bytes, user_data: Any) -> None:
    """Keep llama.cpp's errors for who asks."""
    if level == _ERROR:
        _errors.append(text.decode(errors="replace").strip())


def quiet() -> None:
    """Have llama.cpp write nothing to standard error."""
    llama_cpp.llama_log_set(_note, ctypes.c_void_p(0))
    _errors.clear()


def _why() -> str:
    """Return what llama.cpp said first of what went wrong, without the names of its functions."""
    return " ".join(_errors[0].rpartition("error loading model: ")[2].split()) if _errors else "it does not say why"
