"""Converts files to rows, chats, tokens, data sets and micro-batches. Used by `tape` and above; may import `run`."""
