"""What is under way when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
from cacheblend_rag import BlendConfig, BlendEngine, BlendPrompt, Chunk
from tests.families import tiny_model, tiny_tokenizer, words

engine = BlendEngine(tiny_model("llama", "sdpa"), tiny_tokenizer(), blend=BlendConfig(selector="none"))
engine.add([Chunk(words(20, 0), "n0")])
prompt = BlendPrompt(words(4, 1), ["n0"], words(5, 2))
streams = [engine.stream(prompt, 400, min_new_tokens=400) for _ in range(3)]
if {read}:
    for stream in streams:
        stream.close()
        list(stream)
print("end")
"""


@pytest.mark.parametrize("read", [True, False])
def test_streams_end_with_the_interpreter(read: bool) -> None:
    root = Path(__file__).resolve().parents[2]
    script = _SCRIPT.format(read=read)
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr
