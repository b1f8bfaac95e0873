"""`python -m lockstep`, so that `torchrun -m lockstep train ...` works."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
