"""cacheblend-rag for LangChain: ordinary chains, answered by blended prefill."""

from langchain_cacheblend.chat import ChatBlend
from langchain_cacheblend.llm import BlendLLM
from langchain_cacheblend.messages import documents_to_blocks
from langchain_cacheblend.pml import PMLPromptTemplate
from langchain_cacheblend.vectorstore import BlendVectorStore

__all__ = ["BlendLLM", "BlendVectorStore", "ChatBlend", "PMLPromptTemplate", "documents_to_blocks"]
