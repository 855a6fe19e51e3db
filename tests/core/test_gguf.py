"""Models in GGUF files, unpacked by transformers: a tiny Llama, written here."""

import builtins
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from cacheblend_rag import BlendEngine, BlendPrompt, Chunk
from cacheblend_rag.errors import ConfigError
from tests.families import tiny_model

TOKENS = ["<unk>", "<s>", "</s>", *(chr(65 + number) for number in range(93)), "AB"]


def write(path: Path) -> torch.nn.Module:
    model = tiny_model("llama")
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            names[f"model.layers.{layer}.{ours}.weight"] = f"blk.{layer}.{theirs}.weight"
    for name, weight in model.state_dict().items():
        if ".q_proj" in name or ".k_proj" in name:
            # llama.cpp turns neighbouring pairs of a head, transformers its halves.
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names[name], weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("form", ["file", "folder", "text"])
def test_a_file_or_a_folder_with_one(tmp_path: Path, form: str) -> None:
    file = tmp_path / "tiny.gguf"
    model = write(file)
    name = {"file": file, "folder": tmp_path, "text": str(file)}[form]
    with BlendEngine.from_pretrained(name) as engine:
        ids = torch.tensor([[1, 5, 6, 7]])
        with torch.no_grad():
            assert (engine.model(ids).logits - model(ids).logits).abs().max() < 1e-4
        engine.add([Chunk("CDE", "a")])
        assert engine.prefill(BlendPrompt("AB", ["a"], "F")).report.hits == 1


@pytest.mark.parametrize("share", [0, 0.0005, 0.01, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut(tmp_path: Path, share: float) -> None:
    file = tmp_path / "tiny.gguf"
    write(file)
    content = file.read_bytes()
    file.write_bytes(content[: 4 + int(share * len(content))])
    with pytest.raises(ConfigError, match=r"tiny\.gguf' cannot be loaded"):
        BlendEngine.from_pretrained(file)


def test_several_files_are_told_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"a folder with 2 GGUF files; name one, .*a\.gguf for example"):
        BlendEngine.from_pretrained(tmp_path)


def test_the_package_it_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    file.touch()
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name=name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"not installed \(gguf\): pip install \"cacheblend-rag\[gguf\]\""):
        BlendEngine.from_pretrained(file)
