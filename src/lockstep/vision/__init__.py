"""Images of data rows: references to images, tokens and positions of images, and the image inputs of a micro-batch.

This folder imports no other part of lockstep than errors, because the types of examples and micro-batches contain its
records.
"""
