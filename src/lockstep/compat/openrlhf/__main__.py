"""`python -m lockstep.compat.openrlhf train_dpo FLAGS`: converts the command, reports on every flag, and trains.

`batch_inference` and `serve_rm` run as in OpenRLHF.
"""

from collections.abc import Sequence

from lockstep.compat.conversion_output import main
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.openrlhf.openrlhf_inference import batch_order, rewards_served


def run_inference(program: str, words: Sequence[str]) -> None:
    """Runs `batch_inference` or `serve_rm`, which do not train."""
    if program == "batch_inference":
        order = batch_order(words)

        # This import comes late, because it imports torch: a wrong flag is reported first.
        from lockstep.compat.openrlhf.batch_inference import run_batch

        run_batch(order)
        return
    from lockstep.serve.model_server import serve

    serve(*rewards_served(words))


if __name__ == "__main__":
    main("openrlhf", convert_openrlhf, run_inference)
