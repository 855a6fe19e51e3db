"""Taking a message without an answer back from a chat's memory."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.async_utils import asyncio_run
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemory, Memory
from llama_index.core.storage.chat_store.base_db import MessageStatus

__all__ = ["atake_back", "take_back"]


def take_back(memory: BaseMemory, message: str) -> None:
    """Remove the last message if it is this one of the user.

    Parameters
    ----------
    memory : BaseMemory
        The memory. What LlamaIndex's `Memory` has archived stays archived.
    message : str
        The message.
    """
    if isinstance(memory, Memory):
        asyncio_run(_remove_last(memory, message))
        return
    history = memory.get_all()
    if _ends_with(history, message):
        memory.set(history[:-1])


async def atake_back(memory: BaseMemory, message: str) -> None:
    """Do what `take_back` does."""
    if isinstance(memory, Memory):
        await _remove_last(memory, message)
        return
    history = await memory.aget_all()
    if _ends_with(history, message):
        await memory.aset(history[:-1])


async def _remove_last(memory: Memory, message: str) -> None:
    # `Memory.set` would make active again what was archived for want of room, and the store removes no newest message.
    active = await memory.aget_all(MessageStatus.ACTIVE)
    if not _ends_with(active, message):
        return
    await memory.areset(MessageStatus.ACTIVE)
    if active[:-1]:
        await memory.sql_store.add_messages(memory.session_id, active[:-1], status=MessageStatus.ACTIVE)


def _ends_with(history: Sequence[ChatMessage], message: str) -> bool:
    return bool(history) and history[-1].role == MessageRole.USER and history[-1].content == message
