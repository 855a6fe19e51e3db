"""From a conversation to a prompt of stored chunks, and from an answer to the calls and forms that were asked for."""
