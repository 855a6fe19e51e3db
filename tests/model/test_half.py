"""Half precision: the proofs on ten families in bfloat16, within what its eight bits of mantissa leave."""

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_lab.families import prove, tiny_config, tiny_model
from cacheblend_rag.kv import LayerKV
from cacheblend_rag.model import inspect_model
from cacheblend_rag.rope import shift_layer

FAMILIES = ("llama", "gemma3_text", "deepseek_v3", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "olmo2", "gpt_neox")
# Logits of rows that are computed apart: on a CPU the same to the last bit, elsewhere a rounding or two of one part in 256.
LOGITS_TOLERANCE = 0.01
# KV that is moved is rounded once more; KV that is computed elsewhere is rounded otherwise in every layer. Neither is nearer to
# what float32 gives there, so they may be as far from each other as both are from that.
ROUNDINGS = 2.0
IDS = torch.randint(3, 97, (1, 23), generator=torch.Generator().manual_seed(7))
DISTANCE = 200


def kv_there(model: PreTrainedModel) -> list[LayerKV]:
    return inspect_model(model).kv_at(IDS, DISTANCE)


def distance(some: list[LayerKV], others: list[LayerKV]) -> float:
    """Return how far the median token's KV is from that of `others`, over its norm, in the layer where that is most."""
    worst = 0.0
    for one, other in zip(some, others, strict=True):
        for a, b in zip(one, other, strict=True):
            apart = (a.float() - b.float()).square().sum(dim=(0, 1, 3)) / b.float().square().sum(dim=(0, 1, 3))
            worst = max(worst, float(apart.sqrt().median()))
    return worst


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", [*FAMILIES[:3], *(pytest.param(each, marks=pytest.mark.full) for each in FAMILIES[3:])]
)
def test_blending_in_bfloat16(family: str) -> None:
    model = tiny_model(tiny_config(family), dtype=torch.bfloat16)
    proof = prove(model)
    assert proof.refused is None
    differences = dict(proof.differences)
    assert max(differences[name] for name in ("oracle", "ratio 1.0", "hits and misses")) <= LOGITS_TOLERANCE
    assert differences["greedy answer"] == 0

    decoder = inspect_model(model)
    moved = [LayerKV(*(part.clone() for part in kv)) for kv in decoder.kv_at(IDS, 0)]
    for kv, rotation in zip(moved, decoder.rotations, strict=True):
        assert rotation is not None
        shift_layer(kv, rotation.table(torch.full((IDS.shape[1],), DISTANCE), kv.keys.device))
    there = kv_there(model)
    rounding = distance(there, kv_there(model.float()))
    assert 0 < distance(moved, there) <= ROUNDINGS * rounding
