"""What all pages have: navigation, light and dark, problems in words, and tables of cells."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from starlette.requests import Request

from tidegate_cli.console.cells import Row
from tidegate_cli.console.watch import FleetWatch

REFRESH_SECONDS = 0.25
THEME_COOKIE = "tidegate_theme"
PAGES = {"/": "Pools", "/tenants": "Tenants", "/request": "Request"}

_STYLE = Path(__file__).with_name("style.css")
_THEMES = {"auto": None, "light": False, "dark": True}
_CELLS = """
<q-tr :props="props" :key="props.key">
  <q-td v-for="col in props.cols" :key="col.name" :props="props" :data-label="col.label">
    <div class="cell" :class="'tone-' + props.row[col.name].tone">
      <span class="sr" v-if="props.row[col.name].tone == 'bad'">bad: </span>
      <span class="cell-text">{{ props.row[col.name].text }}</span>
      <div class="bar" v-if="props.row[col.name].bar !== null" aria-hidden="true">
        <i :style="{width: Math.min(100, props.row[col.name].bar) + '%'}"></i>
        <b v-for="m in props.row[col.name].marks.split(' ').filter(Boolean)"
           :key="m" :style="{left: m + '%'}"></b>
      </div>
      <span class="note" v-if="props.row[col.name].note">{{ props.row[col.name].note }}</span>
    </div>
  </q-td>
</q-tr>
"""


def text(tag: str, content: str = "") -> TextElement:
    """Put an element with nothing but text on the page."""
    return TextElement(tag=tag, text=content)


@contextmanager
def page_frame(path: str, request: Request, watch: FleetWatch) -> Iterator[None]:
    """Put everything around a page's own content; the block fills its main part.

    Args:
        path: Of the page, one of `PAGES`.
        request: Tells which theme the visitor chose.
        watch: Tells what could not be read.
    """
    ui.add_css(_STYLE)
    ui.colors(primary="#1257b8")
    with ui.element("header").classes("top"):
        text("span", "Tidegate").classes("brand")
        with ui.element("nav").props('aria-label="Pages"'):
            for target, name in PAGES.items():
                link = ui.link(name, target)
                if target == path:
                    link.props('aria-current="page"')
        with ui.element("div").classes("end"):
            live = text("span").classes("live").props('role="status"')
            _theme_button(request)
    with ui.element("div").classes("content") as content:
        text("h1", PAGES[path])
        problems = text("div").classes("problems").props('role="alert"')
        yield
    ui.skip_link("Skip to content", target=content)

    def tell() -> None:
        told = watch.problems
        problems.text = "\n".join(told)
        problems.set_visibility(bool(told))
        live.text = f"live · {time.strftime('%H:%M:%S')}" if watch.is_live else "not live"

    tell()
    ui.timer(1.0, tell)


def refresh_with(watch: FleetWatch, show: Callable[[], None]) -> None:
    """Show now, and again whenever there is something new."""
    shown = -1

    def refresh() -> None:
        nonlocal shown
        if shown != watch.version:
            shown = watch.version
            show()

    refresh()
    ui.timer(REFRESH_SECONDS, refresh)


def cell_table(columns: Mapping[str, str], *, label: str, rows_per_page: int = 0) -> ui.table:
    """Put a table of cells on the page; on narrow screens each row is a list.

    Args:
        columns: Headings by name.
        label: Says to those who can't see it what it is.
        rows_per_page: 0 = all on one page.
    """
    defined = [
        {"name": name, "label": heading, "field": name, "align": "left"}
        for name, heading in columns.items()
    ]
    table = ui.table(columns=defined, rows=[], row_key="key", pagination=rows_per_page)
    table.props(f'flat wrap-cells aria-label="{label}"')
    table.add_slot("body", _CELLS)
    return table


def set_rows(table: ui.table, rows: Sequence[Row]) -> None:
    """Show other rows, if they are others; controls of pages only where there are several."""
    if list(rows) != table.rows:
        table.rows = list(rows)
        is_one_page = 0 < len(rows) <= (table.pagination["rowsPerPage"] or len(rows))
        table.props(**{"add" if is_one_page else "remove": "hide-bottom"})


def _theme_button(request: Request) -> None:
    chosen = request.cookies.get(THEME_COOKIE, "auto")
    chosen = chosen if chosen in _THEMES else "auto"
    dark = ui.dark_mode(_THEMES[chosen])
    names = list(_THEMES)

    def turn() -> None:
        nonlocal chosen
        chosen = names[(names.index(chosen) + 1) % len(names)]
        dark.value = _THEMES[chosen]
        button.text = f"Theme: {chosen}"
        cookie = f"{THEME_COOKIE}={chosen}; path=/; max-age=31536000; samesite=strict"
        ui.run_javascript(f"document.cookie = '{cookie}'")

    button = text("button", f"Theme: {chosen}").classes("theme").props('type="button"')
    button.on("click", turn)
