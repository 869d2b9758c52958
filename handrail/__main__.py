"""`python -m handrail` is the command `handrail`."""

from __future__ import annotations

from handrail.cli import main

if __name__ == "__main__":
    main()
