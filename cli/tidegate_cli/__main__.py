"""`python -m tidegate_cli` is the `tidegate` command."""

from tidegate_cli.app import main

main()
