"""Personalisation by unions (Prompt Cache, section 5.6.2): six traits of a learner, each a member of a union, chosen at run time.
Run it with ``python examples/pml/personalization.py [MODEL]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cacheblend_pml import Import, Schema, Schemas, Turn
from cacheblend_rag import BlendConfig, BlendEngine

LEARNERS = {
    "Ada": ("middle-school", "beginner", "studied-a-year-before", "auditory", "essay", "high-intrinsic-motivation"),
    "Ben": ("college", "advanced", "recently-studied", "visual", "group-projects", "needs-encouragement"),
}
TASK = Turn("user", "Concisely describe the learner's profile.")


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    schema = Schema.from_file(Path(__file__).parent / "personalization-education.pml")
    with BlendEngine.from_pretrained(model, blend=BlendConfig(recompute_ratio=0.0)) as engine:
        schemas = Schemas(engine)
        loaded = schemas.load(schema)
        print(f"{loaded.encoded} of {loaded.parts} parts encoded, {loaded.tokens} tokens")
        for name, traits in LEARNERS.items():
            prompt = schemas.prompt(schema.prompt(*map(Import, traits), TASK))
            cached = engine.generate(prompt, 60, do_sample=False)
            full = engine.generate(prompt, 60, blend=BlendConfig(enabled=False), do_sample=False)
            print(f"{name}: {cached.text}")
            print(
                f"  {cached.report.hits} hits, {cached.report.misses} misses; first token after "
                f"{1000 * cached.report.ttft_s:.0f} ms, with full prefill {1000 * full.report.ttft_s:.0f} ms"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
