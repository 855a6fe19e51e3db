"""Every family of causal language models of transformers: tiny models, and proofs that blending is exact on them."""

from cacheblend_lab.families.proof import Proof, families, prove, prove_family
from cacheblend_lab.families.tiny import tiny_config, tiny_model, with_outliers

__all__ = ["Proof", "families", "prove", "prove_family", "tiny_config", "tiny_model", "with_outliers"]
