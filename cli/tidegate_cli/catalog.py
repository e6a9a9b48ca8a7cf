"""The ready-made policies that the command applies.

`tidegate_cli/policies` is a link to `policies/catalog`, so that a wheel carries a copy of it.
"""

from pathlib import Path

from tidegate_cli.errors import CommandError

_CATALOG = Path(__file__).resolve().parent / "policies"


class CatalogError(CommandError):
    """There is no ready-made set of policies of that name.

    Attributes:
        name: As it was asked for.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        known = ", ".join(sorted(path.name for path in _CATALOG.glob("*/"))) or "none"
        super().__init__(f"no ready-made policies {name!r}; there are: {known}")


def policies_folder(name: str) -> Path:
    """Return the folder of a ready-made set of policies, for example `gold-silver-batch`.

    Raises:
        CatalogError: There is none of that name.
    """
    folder = (_CATALOG / name).resolve()
    if not folder.is_dir():
        raise CatalogError(name)
    return folder
