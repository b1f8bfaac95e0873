"""Converts files to rows, chats, tokens, data sets and micro-batches.

May be imported by `tape` and the layers above it; may import `run`.
"""
