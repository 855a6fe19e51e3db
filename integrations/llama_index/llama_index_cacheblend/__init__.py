"""LlamaIndex answers from chunks whose KV was computed when they were stored."""

from llama_index_cacheblend.calibrate import calibrate
from llama_index_cacheblend.chat import BlendCondensePlusContextChatEngine, BlendContextChatEngine
from llama_index_cacheblend.estimate import estimate
from llama_index_cacheblend.install import install, uninstall
from llama_index_cacheblend.llm import BlendLLM
from llama_index_cacheblend.pml import PMLPromptTemplate
from llama_index_cacheblend.retriever import BlendRetriever
from llama_index_cacheblend.synthesizer import BlendSynthesizer
from llama_index_cacheblend.vector_store import BlendVectorStore
from llama_index_cacheblend.warm import WarmJob, WarmResult, warm_index

__all__ = [
    "BlendCondensePlusContextChatEngine",
    "BlendContextChatEngine",
    "BlendLLM",
    "BlendRetriever",
    "BlendSynthesizer",
    "BlendVectorStore",
    "PMLPromptTemplate",
    "WarmJob",
    "WarmResult",
    "calibrate",
    "estimate",
    "install",
    "uninstall",
    "warm_index",
]

__version__ = "0.1.0"
