"""The two ways a job ends badly for a reason that the user can act on.

Every message is one line that says what is wrong and what to do. The CLI prints it and exits
with the class's `exit_code`; nothing else may reach a user.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


class InputError(Exception):
    """Bad input, options, weights or output location: nothing was done (exit code 2)."""

    exit_code = 2


class PartialError(Exception):
    """Done in part and said so, for example a source that breaks off (exit code 1)."""

    exit_code = 1


def run_module(main: Callable[[], int | None], before: str = "error: ") -> NoReturn:
    """Run the `main` of a module or tool and exit; such an error is one line on stderr and its code."""
    try:
        sys.exit(main())
    except (InputError, PartialError) as error:
        print(f"{before}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
