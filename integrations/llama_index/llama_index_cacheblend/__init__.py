"""LlamaIndex answers from chunks whose KV was computed when they were stored."""

import lazy_loader  # type: ignore[import-untyped]

from llama_index_cacheblend.chat import BlendCondensePlusContextChatEngine, BlendContextChatEngine
from llama_index_cacheblend.install import install, uninstall
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.retriever import BlendRetriever
from llama_index_cacheblend.synthesizer import BlendSynthesizer
from llama_index_cacheblend.vector_store import BlendVectorStore
from llama_index_cacheblend.warm import estimate, warm_index

__getattr__ = lazy_loader.attach(__name__, submod_attrs={"pml": ["PMLPromptTemplate"]})[0]  # needs cacheblend-pml

__all__ = [
    "BlendCondensePlusContextChatEngine",
    "BlendContextChatEngine",
    "BlendLLM",
    "BlendRetriever",
    "BlendSynthesizer",
    "BlendVectorStore",
    "PMLPromptTemplate",
    "estimate",
    "install",
    "uninstall",
    "warm_index",
]

__version__ = "0.1.0"
