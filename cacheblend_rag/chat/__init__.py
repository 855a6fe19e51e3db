"""Prompts of stored chunks from conversations; calls of tools, and forms that were asked for, from answers."""
