"""`python -m recavsr`: the same as the `recavsr` command."""

from __future__ import annotations

from recavsr.cli.main import main

main()
