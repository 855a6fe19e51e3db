"""Models by the names that people use, and what was proved of each.

What transformers' families do is in the table of families; what vLLM's connector takes follows from their layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cacheblend_lab.family_table import FamilyRow, shipped_table

__all__ = ["name_lines", "proved"]

# Families whose states at the end of a document `cacheblend-hybrid` stores, as its tests show.
_STATES = frozenset(
    "bamba falcon_h1 granitemoehybrid inkling_text lfm2 nemotron_h olmo_hybrid qwen3_5 qwen3_next zamba2".split()
)


# Families that vLLM served from stored KV in the connector's tests.
_SERVED = {
    "llama": "a small trained model",
    "qwen3": "tiny random",
    "gemma3_text": "tiny random",
    "gpt_oss": "tiny random",
}


@dataclass(frozen=True, slots=True)
class _Model:
    """Names of models, the first the one that is shown first; their families; and a model tried with its real weights."""

    names: tuple[str, ...]
    families: tuple[str, ...]
    real: str = ""


def _model(names: str, families: str, real: str = "") -> _Model:
    return _Model(tuple(names.split(", ")), tuple(families.split()), real)


_MODELS = (
    _model("Llama, Llama 2, Llama 3, TinyLlama, Vicuna, Yi, Falcon 3", "llama"),
    _model("Llama 4", "llama4"),
    _model("Qwen2, Qwen2.5, QwQ", "qwen2 qwen2_moe", "Qwen2.5-Coder-0.5B"),
    _model("Qwen3", "qwen3 qwen3_moe"),
    _model("Qwen3.5, Qwen3-Next", "qwen3_5 qwen3_next"),
    _model("Gemma", "gemma"),
    _model("Gemma 2", "gemma2"),
    _model("Gemma 3", "gemma3_text gemma3", "Gemma 3 270M"),
    _model("Gemma 3n", "gemma3n_text"),
    _model("Gemma 4", "gemma4_text gemma4"),
    _model("Mistral, Zephyr, Codestral, Devstral, Magistral", "mistral"),
    _model("Ministral", "ministral ministral3"),
    _model("Mixtral", "mixtral"),
    _model("Phi-2, Phi-1, Phi-1.5", "phi"),
    _model("Phi-3, Phi-3.5, Phi-4", "phi3"),
    _model("Phi-3.5-MoE", "phimoe"),
    _model("gpt-oss", "gpt_oss"),
    _model("DeepSeek-V2, DeepSeek-Coder-V2", "deepseek_v2"),
    _model("DeepSeek-V3, DeepSeek-R1, Kimi K2", "deepseek_v3"),
    _model("DeepSeek-R1-Distill-Llama, DeepSeek-R1-Distill-Qwen", "llama qwen2"),
    _model("DeepSeek-V3.2, DeepSeek-V4, GLM-5", "deepseek_v32 deepseek_v4 glm_moe_dsa"),
    _model("SmolLM, SmolLM2", "llama", "SmolLM2-135M"),
    _model("SmolLM3", "smollm3"),
    _model("Granite, Granite 3", "granite granitemoe"),
    _model("Granite 4", "granitemoehybrid"),
    _model("GLM-4", "glm glm4"),
    _model("GLM-4.5, GLM-4.6", "glm4_moe"),
    _model("GLM-4.7-Flash", "glm4_moe_lite"),
    _model("Command R, Command R+", "cohere"),
    _model("Command R7B, Command A", "cohere2"),
    _model("OLMo, OLMo 2", "olmo olmo2"),
    _model("OLMo 3", "olmo3"),
    _model("OLMoE", "olmoe"),
    _model("MiniMax-M2", "minimax_m2"),
    _model("Falcon", "falcon"),
    _model("StarCoder2", "starcoder2"),
    _model("StableLM", "stablelm"),
    _model("EXAONE 4", "exaone4"),
    _model("Seed-OSS", "seed_oss"),
    _model("ERNIE 4.5", "ernie4_5 ernie4_5_moe"),
    _model("Hunyuan", "hunyuan_v1_dense hunyuan_v1_moe"),
    _model("Bloom, MPT", "bloom mpt"),
    _model("Pythia, GPT-NeoX, GPT-J", "gpt_neox gptj"),
    _model("GPT-2, OPT", "gpt2 opt"),
    _model("Mamba, Mamba 2, Falcon Mamba, Jamba", "mamba mamba2 falcon_mamba jamba"),
    _model("Bamba, Zamba2, Falcon-H1, Nemotron-H", "bamba zamba2 falcon_h1 nemotron_h"),
    _model("LFM2", "lfm2"),
    _model("Kimi Linear, MiniMax-M1, RecurrentGemma, RWKV", "kimi_linear minimax recurrent_gemma rwkv"),
)


def name_lines() -> list[str]:
    """Return what was proved of all models, those of which the same was proved together, as lines of Markdown."""
    rows = _families()
    alike: dict[str, list[str]] = {}
    for model in _MODELS:
        families = [rows[family] for family in model.families]
        verdicts = "; ".join(dict.fromkeys(map(_verdict, families)))
        cells = f"{verdicts}{_real(model)} | {_gguf(model, families)} | {_vllm(families)} |"
        alike.setdefault(cells, []).append(", ".join(model.names))
    lines = [f"| {', '.join(names)} | {cells}" for cells, names in alike.items()]
    return ["| models | transformers | GGUF, by llama.cpp | vLLM's connector |", "|---|---|---|---|", *lines]


def proved(name: str) -> str | None:
    """Return what was proved of a model that goes by a name, by backend; None for a folder, an id and an unknown name."""
    if "/" in name or Path(name).exists():
        return None
    called = [
        (len(_bare(each)), model) for model in _MODELS for each in model.names if _bare(name).startswith(_bare(each))
    ]
    if not called:
        return None
    _, model = max(called, key=lambda each: each[0])
    backends = zip(("transformers", "GGUF", "vLLM"), _backends(model, _families()), strict=True)
    said = [", ".join(model.names), *(f"  {backend}: {what}" for backend, what in backends)]
    return "\n".join([*said, "  To run one and see its layers, give its Hugging Face id or folder."])


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


def _families() -> dict[str, FamilyRow]:
    return {row.family: row for row in shipped_table()[1]}


def _backends(model: _Model, rows: dict[str, FamilyRow]) -> tuple[str, str, str]:
    """Return what was proved of a model's families in transformers, in llama.cpp, and with vLLM."""
    families = [rows[family] for family in model.families]
    return _transformers(model, families), _gguf(model, families), _vllm(families)


def _transformers(model: _Model, families: Sequence[FamilyRow]) -> str:
    said: dict[str, list[str]] = {}
    for row in families:
        said.setdefault(_verdict(row), []).append(f"`{row.family}`")
    return "; ".join(f"{verdict} ({', '.join(names)}, tiny random{_real(model)})" for verdict, names in said.items())


def _verdict(row: FamilyRow) -> str:
    if row.family in _STATES:
        return "not blended: with the extra `hybrid`, the state after a head and one document is stored"
    return row.kind


def _real(model: _Model) -> str:
    return f"; {model.real}, real weights" if model.real else ""


def _gguf(model: _Model, families: Sequence[FamilyRow]) -> str:
    if model.real:
        return f"serves ({model.real}, real weights)"
    recurrent = all(row.family in _STATES or "keep no KV" in row.verdict for row in families)
    return "refused: its state cannot be moved" if recurrent else "untried; checked when the file is opened"


def _vllm(families: Sequence[FamilyRow]) -> str:
    if not all(row.is_exact for row in families):
        return "refused: not every layer has KV of each token"
    if any("fixed" in row.positions for row in families):
        return "refused: its KV cannot be moved"
    if any("over latents" in row.attention for row in families):
        return "refused: latent attention"
    served = [f"serves (`{row.family}`, {_SERVED[row.family]})" for row in families if row.family in _SERVED]
    return "; ".join(served) or "untried; checked when vLLM starts"
