"""Time to the first token of a small random Qwen3-Next, in full and after a state; the argument is the document's tokens."""

import statistics
import sys
import tempfile

from transformers import Qwen3NextConfig

from cacheblend_hybrid import HybridEngine
from cacheblend_lab.families import tiny_model
from cacheblend_rag import BlendConfig, BlendPrompt, Chunk, FixedText
from tests.families import VOCABULARY, tiny_tokenizer, words

_REPEATS = 5
_CONFIG = Qwen3NextConfig(
    vocab_size=VOCABULARY,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    intermediate_size=1024,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    num_experts=8,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)


def main(tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with HybridEngine(tiny_model(_CONFIG), tiny_tokenizer(), store=folder) as engine:
            engine.add([Chunk(words(tokens, 1), "document")])
            prompt = BlendPrompt(FixedText(words(20, 2)), ["document"], words(32, 3))
            engine.prefill(prompt)
            engine.flush()

            def seconds(blend: BlendConfig) -> float:
                return statistics.median(engine.prefill(prompt, blend=blend).report.ttft_s for _ in range(_REPEATS))

            full, stored = seconds(BlendConfig(enabled=False)), seconds(BlendConfig())
            held = engine.store.stats().disk_bytes
    print(
        f"{tokens} tokens: {full:.3f} s in full, {stored:.3f} s after the state ({held / 1e6:.1f} MB): {full / stored:.1f}x"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
