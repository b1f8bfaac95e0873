"""Imported by every interpreter that the launcher's environment reaches; see ascend_emulator/hook.py."""

from ascend_emulator import hook

hook.wait_for_torch_npu()
