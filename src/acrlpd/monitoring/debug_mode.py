"""Debug mode: every few lines of metrics a close look at an update, as files under <run>/debug/ and as metrics."""

import io
import json
import logging
import pathlib
from typing import Any

import jax
import numpy as np
from PIL import Image, ImageDraw

from acrlpd.agents import Agent
from acrlpd.batch import Batch
from acrlpd.monitoring.inspection import ACTION_RANGE, NUM_BINS, Inspection, inspect_update, summarize

logger = logging.getLogger(__name__)

DEBUG_DIRECTORY = "debug"
# Lines of metrics from one inspection to the next, and inspections from one contact sheet to the next.
LINES_PER_INSPECTION = 10
INSPECTIONS_PER_SHEET = 10
_SHEET_ROWS = 8
_CAPTION_HEIGHT = 14
_CAPTION_WIDTH = 200


class DebugMode:
    """Inspects the update of the first line of metrics and of every tenth line, and draws a few contact sheets.

    An inspection computes gradients and candidates once more, and costs one compile. The step alone decides
    whether an update is inspected, so a resumed run inspects the same updates.
    """

    def __init__(self, directory: pathlib.Path | None, log_frequency: int) -> None:
        """`directory` is None on a process that takes part in the computation but writes nothing."""
        self._directory = directory
        self._log_frequency = log_frequency
        self._pending: dict[int, Inspection] = {}  # step -> result, perhaps still being computed
        self._has_sheet = False

    def before_update(self, step: int, agent: Agent, batch: Batch, rng: jax.Array) -> None:
        """`step` is the step that this update makes."""
        period = self._log_frequency * LINES_PER_INSPECTION
        is_sheet_due = not self._has_sheet or step % (period * INSPECTIONS_PER_SHEET) == 0
        self._has_sheet = True
        if is_sheet_due and self._directory is not None and (sheet := contact_sheet(batch)) is not None:
            self._write(f"{step:08d}.png", sheet)
        if step == self._log_frequency or step % period == 0:
            self._pending[step] = inspect_update(agent, batch, rng)

    def on_line(self, step: int) -> dict[str, float]:
        """The metrics of the inspection of this step, if there was one; by now the devices have computed it."""
        inspection = self._pending.pop(step, None)
        if inspection is None:
            return {}
        inspection = jax.device_get(inspection)
        self._write(f"{step:08d}.json", (json.dumps(describe(inspection), allow_nan=False) + "\n").encode())
        return summarize(inspection)

    def _write(self, name: str, content: bytes) -> None:
        if self._directory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / name).write_bytes(content)
        except OSError as error:  # a debug file must not cost the run
            logger.warning("%s cannot be written: %s", self._directory / name, error)


def describe(inspection: Inspection) -> dict[str, Any]:
    """A whole inspection as plain data."""
    content = jax.tree.map(_plain, inspection)
    edges = np.linspace(-ACTION_RANGE, ACTION_RANGE, NUM_BINS + 1)
    content["actions"]["bin_edges"] = [round(edge, 6) for edge in edges.tolist()]
    return content


def _plain(array: Any) -> Any:
    """An array as nested lists, or a number. JSON has no NaN, so a number that is not finite becomes None."""
    plain = np.asarray(array).astype(object)
    plain[~np.isfinite(array)] = None
    return plain.tolist()


def contact_sheet(batch: Batch) -> bytes | None:
    """The first windows of a batch as a PNG: one row per window, with every camera now and a chunk later.

    None where there are no cameras. With several hosts, the sheet shows the windows of this host.
    """
    now, later = batch.observations.images, batch.next_observations.images
    columns = [(camera, _local(images)) for camera, images in now.items()]
    columns += [(f"{camera} later", _local(images)) for camera, images in later.items()]
    if not columns:
        return None
    rows = min(_SHEET_ROWS, columns[0][1].shape[0])
    height, width = columns[0][1].shape[1:3]
    cell, pitch = height + _CAPTION_HEIGHT, max(width, _CAPTION_WIDTH)
    sheet = Image.new("RGB", (pitch * len(columns), cell * rows + _CAPTION_HEIGHT), "black")
    pen = ImageDraw.Draw(sheet)
    episodes, steps, rewards = (_local(x) for x in (batch.episode_id, batch.step_id, batch.rewards))
    for j, (name, images) in enumerate(columns):
        pen.text((j * pitch + 2, 1), name, fill="white")
        for i in range(rows):
            top = _CAPTION_HEIGHT + i * cell
            sheet.paste(Image.fromarray(_as_uint8(images[i])), (j * pitch, top))
            if j == 0:
                caption = f"ep {episodes[i]} step {steps[i]} reward {rewards[i].sum():.3g}"
                pen.text((2, top + height), caption, fill="white")
    png = io.BytesIO()
    sheet.save(png, format="PNG")
    return png.getvalue()


def _local(array: Any) -> np.ndarray:
    """The first part of an array that this process holds."""
    return np.asarray(array.addressable_data(0) if isinstance(array, jax.Array) else array)


def _as_uint8(image: np.ndarray) -> np.ndarray:
    """Float pictures lie in [-1, 1]."""
    return image if image.dtype == np.uint8 else np.clip((image + 1) * 127.5, 0, 255).astype(np.uint8)
