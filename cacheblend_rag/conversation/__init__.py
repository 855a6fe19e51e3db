"""Conversations: what a turn has computed, kept for the next one."""

from cacheblend_rag.conversation.kept import KeptTurns, Making
from cacheblend_rag.conversation.turns import Conversation, Resumption, Turn

__all__ = ["Conversation", "KeptTurns", "Making", "Resumption", "Turn"]
