"""Prints docs/errors.md from `lockstep.errors.CODES`. `make docs` writes it; tests/unit/test_docs.py checks it."""

from lockstep.errors import CODES

INTRODUCTION = """\
<!-- Printed by tools/error_codes.py from src/lockstep/errors.py. Change that, then run `make docs`. -->

# Error codes

If the input is invalid, lockstep reports all problems at once, on stderr, with exit code 2. Each problem has a location
(a key, an option, or a file with its row), a code in square brackets, a reason and a remedy:

```
optim.lrate [unknown-key]
  no such key
  -> did you mean optim.lr?
```

The codes are stable: search for them, or test them in scripts. In Python they are the `code` of the problems of
`lockstep.Refusal`. The wording of a reason may change.

| code | meaning |
|---|---|"""

if __name__ == "__main__":
    print(INTRODUCTION)
    print("\n".join(f"| `{code}` | {meaning} |" for code, meaning in sorted(CODES.items())))
