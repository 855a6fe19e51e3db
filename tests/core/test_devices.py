"""What is computed on a CUDA device is what the CPU computes, on every way that KV takes there; and on the CPU the same twice."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_attachments import SnapKV, SourceAttention
from cacheblend_lab.families import prove, tiny_config
from cacheblend_lab.families import tiny_model as family_model
from cacheblend_lab.family_table import shipped_table
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, FixedText
from tests.families import tiny_model, tiny_tokenizer, words

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
# Logits are of the size of 10. What sums in another order differs in the last digits, layer upon layer.
TOLERANCE = 1e-3
DOCUMENT = [Chunk(words(length, seed), f"d{seed}", document="d") for seed, length in enumerate((20, 33, 9))]
ALONE = [Chunk(words(length, 50 + seed), f"a{seed}") for seed, length in enumerate((25, 14))]
MISSING = Chunk(words(11, 70), "missing")
HEAD = FixedText(words(6, 71))
PROMPTS = {
    "every chunk stored": BlendPrompt(words(3, 80), [DOCUMENT[2], ALONE[0], DOCUMENT[0], ALONE[1]], words(5, 81)),
    "one not stored": BlendPrompt(words(3, 80), [ALONE[1], MISSING, DOCUMENT[1]], words(7, 82)),
    "nothing computed but the question": BlendPrompt(HEAD, DOCUMENT, words(5, 83), " t9 "),
    "no chunk": BlendPrompt(words(30, 84), [], words(5, 85)),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain reuse": {"recompute_ratio": 0.0},
    "hkvd": {"selector": "hkvd", "recompute_ratio": 0.15},
    "a3": {"selector": "a3", "recompute_ratio": 0.3},
    "random": {"selector": "random", "recompute_ratio": 0.3},
    "everything recomputed": {"recompute_ratio": 1.0},
    "full prefill": {"enabled": False},
    "evicted": {"recompute_ratio": 0.0},
    "source attention": {"recompute_ratio": 0.0},
}
ATTACHED = {"evicted": lambda: SnapKV(0.5), "source attention": SourceAttention}


@cache
def model_on(device: str, family: str = "llama") -> PreTrainedModel:
    model = tiny_model(family)
    torch.nn.Module.to(model, device)
    return model


def engine_on(device: str, store: Path | None = None, family: str = "llama", **settings: Any) -> BlendEngine:
    given = {"disk_codec": "native"} | settings
    return BlendEngine(model_on(device, family), tiny_tokenizer(), **engine_settings(**given), store=store)


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, BlendEngine]]:
    """An engine on each device that this machine has, with the same chunks stored."""
    names = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    made = {name: engine_on(name, separator=" t9 ") for name in names}
    for engine in made.values():
        engine.add([*DOCUMENT, *ALONE])
    yield made
    for engine in made.values():
        engine.close()


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.device.type == wanted.device.type == "cpu"
    torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=TOLERANCE)


# On the CPU, which is compared with itself, one prompt a way shows that the test runs.
@pytest.mark.parametrize(
    ("device", "prompt"),
    [("cpu", "one not stored"), *(pytest.param("cuda", name, marks=pytest.mark.cuda) for name in PROMPTS)],
)
@pytest.mark.parametrize("way", WAYS)
def test_prompts_are_answered_as_on_cpu(engines: dict[str, BlendEngine], device: str, prompt: str, way: str) -> None:
    engine, wanted = engines[device], engines["cpu"]
    blend, cpu_blend = engine.blend.replace(**WAYS[way]), wanted.blend.replace(**WAYS[way])
    attached = [each.attach(ATTACHED[way]()) for each in {engine, wanted} if way in ATTACHED]
    # The second time, what the first one missed is stored.
    for _ in range(2):
        ours, theirs = (one.prefill(PROMPTS[prompt], blend=how) for one, how in ((engine, blend), (wanted, cpu_blend)))
        assert_same(ours.logits, theirs.logits)
        assert ours.report.recomputed_tokens == theirs.report.recomputed_tokens
    answer = wanted.generate(PROMPTS[prompt], 10, blend=cpu_blend, do_sample=False)
    stream = engine.stream(PROMPTS[prompt], 10, blend=blend, do_sample=False)
    assert ("".join(stream), stream.result().token_ids) == (answer.text, answer.token_ids)
    many = engine.generate_many([PROMPTS[prompt]] * 3, 10, blend=blend, do_sample=False)
    assert [each.token_ids for each in many] == [answer.token_ids] * 3
    for each in attached:
        each.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", ["native", "int8", "int4"])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_kv_of_every_tier_and_codec_is_that_of_the_cpu(tmp_path: Path, device: str, codec: str, tier: str) -> None:
    """The folder is one: what one device wrote serves the other."""
    room = {"ram_bytes": 0} if tier == "disk" else {}
    prompt = PROMPTS["every chunk stored"]
    results = []
    for name in dict.fromkeys(("cpu", device)):
        settings = {"ram_codec": codec, "disk_codec": codec, **room}
        with engine_on(name, tmp_path, **settings) as engine:
            assert engine.add([*DOCUMENT, *ALONE]).encoded == (5 if name == "cpu" else 0)
            engine.prefill(prompt)
            result = engine.prefill(prompt)
            assert {chunk.tier for chunk in result.report.chunks} == {tier}
            results.append(result.logits)
    if codec == "native":
        assert_same(results[0], results[-1])
    else:
        # A number that lies between two that the codec has may be rounded either way.
        assert float((results[0] - results[-1]).norm() / results[0].norm()) < 0.02


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        *((row.family, torch.float32, 1e-3) for row in shipped_table()[1] if row.is_exact),
        *((each, half, 0.05) for each in ("llama", "qwen2", "gemma3_text") for half in (torch.bfloat16, torch.float16)),
    ],
)
def test_every_family_is_exact_on_cuda(family: str, dtype: torch.dtype, tolerance: float) -> None:
    model = family_model(tiny_config(family), dtype=dtype)
    torch.nn.Module.to(model, "cuda")
    # Both sides are computed on the device, whose kernels sum in orders of their own.
    proof = prove(model, tolerance)
    differences = dict(proof.differences)
    assert max(differences[name] for name in ("oracle", "ratio 1.0", "hits and misses")) <= tolerance
    # In half precision other answers are as good.
    assert proof.is_exact or dtype != torch.float32, proof
