"""Where `lockstep`, `python -m lockstep` and `torchrun -m lockstep` begin."""

from __future__ import annotations

import signal


def main() -> None:
    """Ctrl-C ends the process without a word until the command line is there to say one: otherwise Python would show
    the import that it fell into."""
    waits = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if waits:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from lockstep.cli import main as command_line

    if waits:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command_line()


if __name__ == "__main__":
    main()
