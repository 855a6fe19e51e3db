"""The model's own prefill of a prompt with gaps between its positions."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend_rag.model import takes_positions, text_decoder


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """Return the model's own logits behind tokens, ``(vocab,)``, that stand at `positions`, ascending, or one behind the other.

    A model that takes no positions is given every position there is, and a mask that hides those without a token.
    """
    if positions is None:
        return model(torch.tensor([ids])).logits[0, -1]
    if takes_positions(text_decoder(model)):
        # Without a cache, transformers takes gapped positions for several sequences in one.
        return model(
            input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), past_key_values=DynamicCache()
        ).logits[0, -1]
    length = positions[-1] + 1
    filled = torch.full((1, length), 5)
    filled[0, list(positions)] = torch.tensor(ids)
    there = torch.zeros(1, length, dtype=torch.int64)
    there[0, list(positions)] = 1
    decoder: Any = text_decoder(model)
    with pytest.MonkeyPatch.context() as patch:
        # BLOOM counts the tokens that its mask shows; here hidden ones count as well.
        if model.config.model_type == "bloom":
            build = decoder.build_alibi_tensor
            patch.setattr(
                decoder, "build_alibi_tensor", lambda mask, *args, **kw: build(torch.ones_like(mask), *args, **kw)
            )
        return model(input_ids=filled, attention_mask=there, past_key_values=DynamicCache()).logits[0, -1]
