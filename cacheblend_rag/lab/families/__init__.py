"""Every family of causal language models of transformers: tiny models, proofs that blending is exact on them, and the table."""

from cacheblend_rag.lab.families.proof import FamilyRow, Proof, families, prove, prove_family, table_lines
from cacheblend_rag.lab.families.tiny import tiny_config, tiny_model

__all__ = ["FamilyRow", "Proof", "families", "prove", "prove_family", "table_lines", "tiny_config", "tiny_model"]
