"""From files to rows, chats, tokens, data sets and micro-batches. For `tape` and all above it; it may import `run`."""
