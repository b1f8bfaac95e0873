"""Tests on the real torch_npu over an emulated CANN. A package, because names of files here repeat those elsewhere."""
