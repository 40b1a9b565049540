"""The console of all commands: rich's console, with texts that are not trusted."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from acrlpd.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


class Console(rich.console.Console):  # noqa: TID251
    """Shows control characters instead of obeying them, and takes brackets in a string for brackets.

    What shall have a style is a `Text`. A string is never markup, since a name such as "lr[/bold]" may be part of it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Makes a text of a string: before the string gets its colours, so that each colour is in its place."""
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Everything that is printed passes here: texts as a whole, so that lines break where they should."""
        if isinstance(renderable, Text):
            renderable = renderable.copy()
            renderable.plain = printable(renderable.plain)
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def progress(*columns: "ProgressColumn", **options: Any) -> "Progress":
    """A progress bar on stderr: the name of the work, the bar, the time that is left, and `columns`."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    name = TextColumn("{task.description}", markup=False)
    return Progress(name, BarColumn(), TimeRemainingColumn(), *columns, console=Console(stderr=True), **options)
