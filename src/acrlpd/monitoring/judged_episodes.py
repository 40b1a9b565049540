"""The episodes of an evaluation as dashboards show them: a table, and films."""

import dataclasses
import io
import pathlib
from collections.abc import Sequence
from typing import Any

import av
from PIL import Image

from acrlpd.runs.directory import read_run_file
from acrlpd.runs.record import EVALUATION_FILE, EVALUATIONS
from acrlpd.text import escape_markdown, markdown_table

# A film that is shown as a moving picture has at most so many frames, and so many pixels in a row.
_GIF_FRAMES = 60
_GIF_WIDTH = 240


@dataclasses.dataclass(frozen=True)
class JudgedEpisodes:
    """One row for each episode of an evaluation, and the films of some of them."""

    step: int
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    videos: tuple[pathlib.Path, ...]

    def to_markdown(self) -> str:
        columns, *rows = ([escape_markdown(str(cell)) for cell in line] for line in (self.columns, *self.rows))
        return markdown_table(columns, rows)


def read_judged_episodes(run: pathlib.Path, step: int) -> JudgedEpisodes | None:
    """What the evaluation at this step left in the directory of a run; None if it left nothing."""
    content = read_run_file(run / EVALUATIONS / str(step) / EVALUATION_FILE)
    episodes: Sequence[dict[str, Any]] = (content or {}).get("per_episode") or ()
    if content is None or not episodes:
        return None
    columns = tuple(episodes[0])
    videos = tuple(pathlib.Path(video) for video in content.get("videos") or ())
    return JudgedEpisodes(step, columns, tuple(tuple(e[name] for name in columns) for e in episodes), videos)


def to_gif(video: pathlib.Path) -> tuple[bytes, tuple[int, int]]:
    """A film as a moving picture, and its width and height: all that TensorBoard can show of a film."""
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        every = max(1, -(-stream.frames // _GIF_FRAMES))
        rate = float(stream.average_rate or 10) / every
        frames = [frame.to_image() for i, frame in enumerate(container.decode(stream)) if i % every == 0]
    width, height = frames[0].size
    size = (_GIF_WIDTH, round(height * _GIF_WIDTH / width)) if width > _GIF_WIDTH else (width, height)
    first, *others = (frame.resize(size, Image.Resampling.BILINEAR) for frame in frames)
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=round(1000 / rate), loop=0)
    return file.getvalue(), size
