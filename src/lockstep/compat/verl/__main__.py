"""`python -m lockstep.compat.verl main_ppo KEY=VALUE ...`: convert, say what became of every key, and train."""

from lockstep.compat.command import main
from lockstep.compat.verl.command import PROGRAMS, convert_verl

if __name__ == "__main__":
    main("verl", convert_verl, PROGRAMS)
