"""From rows to tokens: columns, chats, templates, and one file per kind of row."""
