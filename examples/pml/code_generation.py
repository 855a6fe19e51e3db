"""Code generation over files (Prompt Cache, section 5.6.1): each source file is a module, and a changed file is the only one that
is encoded again. Run it with ``python examples/pml/code_generation.py [MODEL]``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from cacheblend_pml import Import, Schema, Schemas, Turn
from cacheblend_rag import BlendConfig, BlendEngine

HERE = Path(__file__).parent
TASK = Turn("user", "Create a main entry point for the game, using Map, Player, and Game classes.")


def main(model: str = "Qwen/Qwen2.5-0.5B-Instruct") -> None:
    blend = BlendConfig(recompute_ratio=0.0)
    with tempfile.TemporaryDirectory() as folder, BlendEngine.from_pretrained(model, blend=blend) as engine:
        project = Path(folder)
        shutil.copytree(HERE / "game", project / "game")
        shutil.copy(HERE / "code-generation-game.pml", project)

        schemas, schema = Schemas(engine), Schema.from_file(project / "code-generation-game.pml")
        loaded = schemas.load(schema)
        print(f"{loaded.encoded} of {loaded.parts} parts encoded, {loaded.tokens} tokens")
        prompt = schema.prompt(*(Import(name) for name in schema.modules), TASK)
        result = engine.generate(schemas.prompt(prompt), 60, do_sample=False)
        print(result.text)
        print(f"{result.report.hits} hits, first token after {1000 * result.report.ttft_s:.0f} ms")

        # One file is edited. The others keep their KV, although they move.
        file = project / "game" / "unit.py"
        file.write_text(
            file.read_text() + "\n    def heal(self, points: int) -> None:\n        self.health += points\n"
        )
        loaded = schemas.load(Schema.from_file(project / "code-generation-game.pml"))
        print(f"after an edit: {loaded.encoded} of {loaded.parts} parts encoded")


if __name__ == "__main__":
    main(*sys.argv[1:])
