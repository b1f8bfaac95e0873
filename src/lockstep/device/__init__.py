"""The devices and the facts about each. For `kernels` and all above; importing it is cheap and pulls in no torch."""

from lockstep.device import autoload, threads

# Before the first `import torch`, which is the only moment at which they help.
autoload.defer()
threads.wait_asleep()
threads.follow_quota()
