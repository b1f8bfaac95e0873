"""`python -m lockstep.compat.verl main_ppo KEY=VALUE ...`: convert the command, report on every key, and train."""

from lockstep.compat.conversion_output import main
from lockstep.compat.verl.convert_verl import convert_verl

if __name__ == "__main__":
    main("verl", convert_verl)
