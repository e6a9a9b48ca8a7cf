"""The ready-made policies that the command applies.

In a checkout they are in `policies/catalog`; a wheel carries a copy inside this package.
"""

from pathlib import Path

from tidegate_cli.errors import CommandError

_PACKAGE = Path(__file__).resolve().parent


class CatalogError(CommandError):
    """A ready-made set of policies is not where it belongs.

    Attributes:
        path: Where it should be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(f"{path} is missing: this installation of tidegate is incomplete")


def policies_folder(name: str) -> Path:
    """Return the folder of a ready-made set of policies, for example `gold-silver-batch`."""
    packaged = _PACKAGE / "catalog_files" / name
    in_checkout = _PACKAGE.parents[1] / "policies" / "catalog" / name
    for path in (packaged, in_checkout):
        if path.is_dir():
            return path
    raise CatalogError(in_checkout)
