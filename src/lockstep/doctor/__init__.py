"""`lockstep doctor`: reports installed versions, problems and remedies.

Nothing in this package imports torch, transformers or a device package, because the doctor must work when these
packages do not load. `kernels` and higher import layers use this package.
"""
