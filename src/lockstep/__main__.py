"""Entry point of `lockstep`, `python -m lockstep` and `torchrun -m lockstep`."""

from __future__ import annotations

import signal


def main() -> None:
    """Runs the command line; during its imports, Ctrl-C ends the process without a traceback."""
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if waits:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lockstep.run.caches import cache_bytecode

    cache_bytecode()
    from lockstep.cli import main as command_line

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line()


if __name__ == "__main__":
    main()
