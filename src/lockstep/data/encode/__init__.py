"""Encodes rows as tokens: columns, chats, templates, and one file per kind of row."""
