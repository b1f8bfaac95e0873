"""The devices and the facts about each. For `kernels` and all above; importing it is cheap and pulls in no torch."""

from lockstep.device import process_setup

# Before the first `import torch`, which is the only moment at which they help.
process_setup.defer()
process_setup.wait_asleep()
process_setup.follow_quota()
