"""cacheblend-rag for LangChain: ordinary chains, answered by blended prefill."""

import lazy_loader  # type: ignore[import-untyped]

from langchain_cacheblend.chain import create_blend_documents_chain
from langchain_cacheblend.chat import ChatBlend
from langchain_cacheblend.llm import BlendLLM
from langchain_cacheblend.messages import documents_to_blocks
from langchain_cacheblend.vectorstore import BlendVectorStore
from langchain_cacheblend.warm import estimate, warm

__getattr__ = lazy_loader.attach(__name__, submod_attrs={"pml": ["PMLPromptTemplate"]})[0]  # needs cacheblend-pml

__all__ = [
    "BlendLLM",
    "BlendVectorStore",
    "ChatBlend",
    "PMLPromptTemplate",
    "create_blend_documents_chain",
    "documents_to_blocks",
    "estimate",
    "warm",
]
