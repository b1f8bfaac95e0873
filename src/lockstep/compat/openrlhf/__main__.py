"""`python -m lockstep.compat.openrlhf train_dpo FLAGS`: convert, say what became of every flag, and train.
`batch_inference` and `serve_rm` do what they do there."""

from functools import partial

from lockstep.compat.command import main
from lockstep.compat.openrlhf.command import PROGRAMS, convert_openrlhf
from lockstep.compat.openrlhf.inference import PROGRAMS as INFERENCE
from lockstep.compat.openrlhf.inference import run_inference

if __name__ == "__main__":
    main("openrlhf", convert_openrlhf, PROGRAMS, {name: partial(run_inference, name) for name in INFERENCE})
