"""Functions of the user's own: found, checked, and limited in time. Any folder may import it.

Nothing heavy is imported here: the processes must start in a moment.
"""

from lockstep.functions.own import (
    LONGEST_WHY,
    OwnFunction,
    Unloadable,
    file_being_run,
    give,
    given,
    is_function_path,
    located,
    only_here,
    own_function,
    told,
)

__all__ = [
    "LONGEST_WHY",
    "OwnFunction",
    "Unloadable",
    "file_being_run",
    "give",
    "given",
    "is_function_path",
    "located",
    "only_here",
    "own_function",
    "told",
]
