"""`python -m lockstep.compat.openrlhf train_dpo FLAGS`: convert, say what became of every flag, and train."""

from lockstep.compat.command import main
from lockstep.compat.openrlhf.command import PROGRAMS, convert_openrlhf

if __name__ == "__main__":
    main("openrlhf", convert_openrlhf, PROGRAMS)
