"""The tokenizer of a GGUF file: llama.cpp reads and spells the words, transformers fills in the chat template."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import llama_cpp
from tokenizers import AddedToken
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizerBase

from cacheblend_rag.errors import ConfigError, UnsupportedModelError

__all__ = ["LlamaTokenizer"]

_SPECIAL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_ADDED = _SPECIAL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
_MOST_BYTES = 1 << 14


class LlamaTokenizer(PreTrainedTokenizerBase):
    """The tokenizer of a model that llama.cpp has loaded, in the form of one of transformers; `end_ids` end an answer."""

    is_fast = False

    def __init__(self, path: Path, model: Any) -> None:
        self._path = path
        self._vocab = vocab = llama_cpp.llama_model_get_vocab(model)
        # llama.cpp ends the process where it is asked for tokens of such a file, or after the model is gone.
        if llama_cpp.llama_vocab_type(vocab) == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
            raise UnsupportedModelError(f"{path.name} has no tokenizer; use another GGUF file of the model")
        self._in_use = threading.Lock()
        ids = range(llama_cpp.llama_vocab_n_tokens(vocab))
        spelled = ctypes.create_string_buffer(_MOST_BYTES)
        self._pieces = [
            ctypes.string_at(spelled, llama_cpp.llama_token_to_piece(vocab, id, spelled, _MOST_BYTES, 0, True))
            for id in ids
        ]
        self.end_ids = tuple(id for id in ids if llama_cpp.llama_vocab_is_eog(vocab, id))
        self._words = {self._word(id): id for id in reversed(ids)}
        self._added = {
            id: AddedToken(self._word(id), special=bool(kind & _SPECIAL), normalized=False)
            for id in ids
            if (kind := int(llama_cpp.llama_vocab_get_attr(vocab, id))) & _ADDED
        }
        self._special = {id for id, token in self._added.items() if token.special}
        named = {"bos_token": llama_cpp.llama_vocab_bos(vocab), "eos_token": llama_cpp.llama_vocab_eos(vocab)}
        template = llama_cpp.llama_model_chat_template(model, None)
        super().__init__(  # type: ignore[no-untyped-call]
            chat_template=template and template.decode(),
            **{name: self._word(id) for name, id in named.items() if id >= 0},
        )

    def close(self) -> None:
        """Read no more, since the model is about to go; what was read can still be spelled."""
        with self._in_use:
            self._vocab = None

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        return len(self)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are no ordinary words, by their ids."""
        return self._added

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all words."""
        return dict(self._words)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return the word, or words, of an id or several."""
        if isinstance(ids, int):
            return self._word(ids)
        return [self._word(id) for id in ids if not (skip_special_tokens and id in self._special)]

    def guidance(self, **options: Any) -> Any:
        """Return the tokenizer as llguidance takes it, which constrains answers."""
        from llguidance.llamacpp import lltokenizer_from_vocab

        with self._in_use:
            self._check_open()
            return lltokenizer_from_vocab(self._vocab, **options)

    def save_pretrained(self, save_directory: Any, *given: Any, **options: Any) -> Any:
        """Write the tokenizer as transformers reads it out of the file, for who has the words of a server's answers only."""
        try:
            read = AutoTokenizer.from_pretrained(str(self._path.parent), gguf_file=self._path.name)
        except (ValueError, KeyError) as error:
            raise UnsupportedModelError(
                f"transformers cannot read the tokenizer of {self._path.name} ({error}); use the model where its file is"
            ) from error
        read.add_tokens([token for token in self._added.values() if token.special], special_tokens=True)
        read.add_tokens([token for token in self._added.values() if not token.special])
        read.chat_template = self.chat_template
        return read.save_pretrained(save_directory, *given, **options)

    def _word(self, id: int) -> str:
        return self._pieces[id].decode(errors="replace")

    def _convert_token_to_id_with_added_voc(self, token: str) -> int | None:
        return self._words.get(token)

    # Of one text, without padding.
    def _encode_plus(  # type: ignore[override]
        self, text: str, add_special_tokens: bool = True, **options: Any
    ) -> BatchEncoding:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        with self._in_use:
            self._check_open()
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), ids, len(ids), add_special_tokens, True)
        return BatchEncoding({"input_ids": list(ids[:count])}, tensor_type=options.get("return_tensors"))

    def _decode(
        self, token_ids: int | list[int], skip_special_tokens: bool = False, *given: Any, **options: Any
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        kept = (self._pieces[id] for id in ids if not (skip_special_tokens and id in self._special))
        return b"".join(kept).decode(errors="replace")

    def _check_open(self) -> None:
        if self._vocab is None:
            raise ConfigError("the engine of this tokenizer was closed; make a new one")
