"""torch_npu, the real wheel, on an ordinary CPU: a CANN that is emulated underneath it. See README.md."""
