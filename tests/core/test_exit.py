"""What is under way when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.core.test_ingest import held, make

_SCRIPT = """
from pathlib import Path
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from tests.core.test_ingest import CHUNKS, make
from tests.families import tiny_model, tiny_tokenizer, words

make(Path({folder!r})).add(CHUNKS, background=True)
engine = BlendEngine(tiny_model("llama", "sdpa"), tiny_tokenizer(), blend=BlendConfig(selector="none"))
engine.add([Chunk(words(20, 0), "n0")])
prompt = BlendPrompt(words(4, 1), ["n0"], words(5, 2))
streams = [engine.stream(prompt, 400, min_new_tokens=400) for _ in range(5)]
for stream in streams[:2]:
    stream.close()
    list(stream)
print("end")
"""


def test_streams_end_with_the_interpreter_and_what_was_given_is_encoded(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    script = _SCRIPT.format(folder=str(tmp_path / "kv"))
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
    with make(tmp_path / "kv") as engine:
        assert held(engine) == {f"n{n}": True for n in range(6)}
