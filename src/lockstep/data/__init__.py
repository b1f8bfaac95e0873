"""Converts files to rows, tokens and micro-batches. May be imported by `tape` and the layers above; may import
`run`."""
