"""The devices and their properties, for `kernels` and higher import layers. Importing `device` needs no torch."""

from lockstep.device import process_setup

# These calls set environment variables and must run before the first `import torch`.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
