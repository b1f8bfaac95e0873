"""`python -m lockstep.compat.openrlhf train_dpo FLAGS`: convert the command, report on every flag, and train.

`batch_inference` and `serve_rm` run as in OpenRLHF.
"""

from lockstep.compat.conversion_output import main
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.openrlhf.openrlhf_inference import run_inference

if __name__ == "__main__":
    main("openrlhf", convert_openrlhf, run_inference)
