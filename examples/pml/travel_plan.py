"""A parameterised travel plan (Prompt Cache, section 5.6.3): the length of the trip is an argument, the destination a member of a
union. Run it with ``python examples/pml/travel_plan.py [MODEL]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cacheblend_pml import Import, Schema, Schemas, Turn
from cacheblend_rag import BlendConfig, BlendEngine

TASK = Turn("user", "Create a travel plan.")


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    schema = Schema.from_file(Path(__file__).parent / "travel.pml")
    with BlendEngine.from_pretrained(model, blend=BlendConfig(recompute_ratio=0.0)) as engine:
        schemas = Schemas(engine)
        loaded = schemas.load(schema)
        print(f"{loaded.encoded} of {loaded.parts} parts encoded, {loaded.tokens} tokens")
        for duration, place in (("a week", "tokyo"), ("two days", "rome")):
            plan = Import("travel-plan", {"duration": duration}, [Import("overseas", {}, [Import(place)])])
            stream = engine.stream(schemas.prompt(schema.prompt(plan, TASK)), 60, do_sample=False)
            print(f"{duration} in {place}: ", end="")
            for piece in stream:
                print(piece, end="", flush=True)
            report = stream.result().report
            computed = report.prompt_tokens - report.context_tokens
            print(
                f"\n  {report.hits} hits, {report.misses} misses; {computed} of {report.prompt_tokens} tokens computed"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
