"""From files to rows, chats, tokens, data sets and micro-batches. Used by `tape` and all above; it may import `run`."""
