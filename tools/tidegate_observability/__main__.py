"""Write dashboards and metrics reference; run at the repository's root."""

import sys

from tidegate_observability.generated import files


def main() -> int:
    """Write all files."""
    for path, text in files():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
