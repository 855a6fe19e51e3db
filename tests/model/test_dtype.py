"""The dtype that a checkpoint is loaded in where none is set."""

from pathlib import Path

import pytest
import torch

from cacheblend_lab.settings import engine_settings
from cacheblend_rag import BlendEngine
from tests.families import tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("units", "own", "wanted"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16, torch.bfloat16),
        ({"bf16": True}, torch.bfloat16, torch.bfloat16),
        ({"avx512_bf16": False}, torch.bfloat16, torch.float32),
        ({"avx512_bf16": True, "avx512_fp16": True}, torch.float16, torch.float32),
    ],
)
def test_it_is_the_checkpoints_own_where_the_cpu_has_units_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    units: dict[str, bool],
    own: torch.dtype,
    wanted: torch.dtype,
) -> None:
    tiny_model("qwen2").to(own).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    for given, loaded in (({}, wanted), ({"dtype": "float16"}, torch.float16)):
        with BlendEngine.from_pretrained(tmp_path, **engine_settings(device="cpu", **given)) as engine:
            assert engine.model.dtype == loaded
