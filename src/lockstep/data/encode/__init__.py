"""Converts rows to tokens: columns, chats, templates, and one module per kind of row."""
