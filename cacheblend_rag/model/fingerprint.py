"""A digest of everything about a model that its KV depends on."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import PreTrainedModel

__all__ = ["model_fingerprint"]


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a digest of a model's weights, buffers, dtype and configuration.

    Every byte of the weights is read, so that two models of one name but different weights never share KV; about a
    second for two gigabytes.

    Parameters
    ----------
    model : PreTrainedModel
        The model, with whatever adapters are in it.

    Returns
    -------
    str
        32 hexadecimal digits (blake2b, 128 bits).
    """
    tensors = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_tensor_digest, [tensor for _, tensor in tensors]))
    whole = hashlib.blake2b(digest_size=16)
    for (name, tensor), digest in zip(tensors, digests, strict=True):
        whole.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        whole.update(digest)
    config = model.config.to_dict()
    for unrelated in ("_name_or_path", "transformers_version", "architectures", "torch_dtype"):
        config.pop(unrelated, None)
    whole.update(json.dumps(config, sort_keys=True, default=str).encode())
    return whole.hexdigest()


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
