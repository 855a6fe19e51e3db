"""Models with quantised weights: KV of their own, and a self-check that follows what their kernels round."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from cacheblend_lab import families
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.fuse import BlendCache, Steering, selfcheck
from cacheblend_rag.fuse.selfcheck import true_kv
from cacheblend_rag.model import CACHE, KVCache, inspect_model, model_fingerprint
from cacheblend_rag.selection import Selection
from tests.core.dense import random_ids, span_layout
from tests.families import tiny_tokenizer, words

# What these packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


def tiny_model(**changes: Any) -> PreTrainedModel:
    """Return a tiny model whose rows are long enough to be quantised in blocks of 64."""
    return families.tiny_model(
        families.tiny_config("llama", hidden_size=128, intermediate_size=128, head_dim=32, **changes)
    )


QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "fp4": {"load_in_4bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.fixture(params=QUANTISED)
def quantise(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., PreTrainedModel]:
    """Make a tiny model anew and quantise it."""

    def quantised(scale: float = 1.0) -> PreTrainedModel:
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight *= scale
        model.save_pretrained(tmp_path / "model")
        config = BitsAndBytesConfig(**QUANTISED[request.param])
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=config)
        return loaded.eval()

    return quantised


def test_kv_belongs_to_the_quantised_weights(quantise: Callable[..., PreTrainedModel], tmp_path: Path) -> None:
    def engine(model: PreTrainedModel) -> BlendEngine:
        return BlendEngine(model, tiny_tokenizer(), store=tmp_path / "kv", **engine_settings(strict=True))

    def hits(model: PreTrainedModel) -> int:
        with engine(model) as opened:
            return opened.prefill(BlendPrompt(words(4, 10), chunks, words(6, 11))).report.hits

    chunks = [Chunk(words(20, seed), f"n{seed}") for seed in range(2)]
    with engine(tiny_model()) as full:
        full.add(chunks)
    assert hits(quantise()) == 0
    with engine(quantise()) as quantised:
        quantised.add(chunks)
    assert hits(quantise()) == 2
    # Twice the weights have the same codes, and other scales.
    assert hits(quantise(scale=2.0)) == 0


@torch.no_grad()
def test_blending_is_exact_up_to_what_the_kernels_round(quantise: Callable[..., PreTrainedModel]) -> None:
    decoder = inspect_model(quantise())
    model, ids = decoder.model, random_ids(1)
    layout, own, draw = span_layout(ids), KVCache(decoder.num_layers), random.Random(0)
    wanted = model(input_ids=torch.tensor([ids]), **{CACHE: own}, use_cache=True).logits[0, -1]
    for ratio in (0.0, 0.15, 0.5):
        rows = sorted(draw.sample(layout.context_rows.tolist(), round(ratio * layout.context_tokens)))
        cache = BlendCache(decoder.num_layers)
        selection = Selection(torch.tensor(rows, dtype=torch.int64))
        with Steering(decoder, cache, layout, selection, true_kv(own.kv()))():
            got = model(input_ids=torch.tensor([ids]), **{CACHE: cache}, use_cache=True).logits[0, -1]
        # Kernels that round what they are handed differ from themselves once a last bit of it does.
        assert (got - wanted).norm() / wanted.norm() <= 0.3
    # Some packages change the weights when their state is asked for.
    model_fingerprint(model)
    assert torch.equal(model(input_ids=torch.tensor([ids])).logits[0, -1], wanted)


def test_the_self_check_takes_it_and_refuses_wrong_turns(quantise: Callable[..., PreTrainedModel]) -> None:
    decoder = inspect_model(quantise())
    selfcheck.check_blending(decoder)
    selfcheck.check_batching(decoder)
    # Keys turned by the frequencies of another model.
    other = inspect_model(tiny_model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))
    with pytest.raises(UnsupportedModelError, match="moved"):
        selfcheck.check_blending(replace(decoder, rotations=other.rotations))


def test_how_a_model_is_quantised_is_in_the_key() -> None:
    configs: list[Any] = [
        None,
        *(transformers.AwqConfig(group_size=size) for size in (64, 128)),
        *(transformers.GPTQConfig(bits=bits) for bits in (4, 8)),
        *(BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold) for threshold in (0.0, 6.0)),
        *({"quant_method": "compressed-tensors", "format": form} for form in ("int-quantized", "float-quantized")),
        transformers.FineGrainedFP8Config(),
    ]
    model, seen = tiny_model(), set()
    for config in configs:
        model.config.quantization_config = config
        seen.add(model_fingerprint(model))
    assert len(seen) == len(configs)


def test_what_cannot_be_loaded_here_is_said_in_one_line(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="EETQ") as error:
        BlendEngine.from_pretrained(tmp_path, quantization_config=transformers.EetqConfig())
    assert "\n" not in str(error.value)
