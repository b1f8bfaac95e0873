"""`python -m lockstep.compat.verl main_ppo KEY=VALUE ...`: converts the command, reports on every key, and trains."""

from lockstep.compat.conversion_output import main
from lockstep.compat.verl.convert_verl import convert_verl

if __name__ == "__main__":
    main("verl", convert_verl)
