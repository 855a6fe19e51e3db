"""The model's own prefill of a prompt with gaps between its positions."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend_rag.model import CACHE


@torch.no_grad()
def own_logits(model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int] | None = None) -> torch.Tensor:
    """Return the model's own logits behind tokens, ``(vocab,)``, at ascending `positions`, or one behind the other."""
    if positions is None:
        return model(torch.tensor([ids])).logits[0, -1]
    # Without a cache, transformers takes gapped positions for several sequences in one.
    places = torch.tensor([positions])
    return model(input_ids=torch.tensor([ids]), position_ids=places, **{CACHE: DynamicCache()}).logits[0, -1]
