"""`python -m tidegate_operator` runs the operator."""

from tidegate_operator.main import main

if __name__ == "__main__":
    raise SystemExit(main())
