"""What share of an answer's attention goes to each chunk, against the model's own attention matrices."""

import pytest
import torch
from transformers import PreTrainedModel

from cacheblend_attachments import SourceAttention
from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine, BlendPrompt, Chunk, GenerationResult
from tests.families import tiny_model, tiny_tokenizer, words

CHUNKS = [Chunk(words(length, seed), f"n{seed}") for seed, length in enumerate((20, 22, 17))]
PROMPT = BlendPrompt(words(4, 50), CHUNKS, words(6, 51))
LAYERS = (2, 3)


def own_shares(model: PreTrainedModel, engine: BlendEngine, result: GenerationResult) -> list[float]:
    """The same from the matrices of one eager forward over prompt and answer."""
    eager = tiny_model("llama", "eager")
    eager.load_state_dict(model.state_dict())
    ids = torch.tensor([[*result.prompt_ids, *result.token_ids[:-1]]])
    with torch.no_grad():
        matrices = eager(input_ids=ids, output_attentions=True).attentions
    rows = torch.cat([matrices[layer][0, :, len(result.prompt_ids) - 1 :] for layer in LAYERS])
    spans = engine.prompt_layout(PROMPT).chunks
    return [float(rows[..., span.start : span.stop].sum(-1).mean()) for span in spans]


@pytest.mark.parametrize(("selector", "ratio"), [("hkvd", 0.999), ("random", 0.999), ("boundary", 1.0)])
def test_the_shares_are_those_of_the_models_own_matrices(selector: str, ratio: float) -> None:
    model = tiny_model("llama")
    settings = engine_settings(strict=True, self_check=False, selector=selector, recompute_ratio=ratio)
    with BlendEngine(model, tiny_tokenizer(), **settings) as engine:
        engine.add(CHUNKS)
        attached = engine.attach(SourceAttention())
        result = engine.generate(PROMPT, 7, eos_token_id=None)
        shares = [chunk.attention for chunk in result.report.chunks]
        # The random tokens move the model's attention about, so equal figures are no accident.
        wanted = own_shares(model, engine, result)
        assert max(wanted) > 0.05
        assert shares == pytest.approx(wanted, abs=1e-4)
        attached.close()
        assert engine.generate(PROMPT, 7, eos_token_id=None).token_ids == result.token_ids
