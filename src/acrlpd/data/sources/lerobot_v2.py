"""LeRobot v2.0 and v2.1: one parquet file per episode, one video file per episode and camera."""

import json
from pathlib import Path
from typing import Any

from acrlpd.data.sources.lerobot import LeRobotSource, Rows
from acrlpd.data.sources.source import DatasetError


class LeRobotV2Source(LeRobotSource):
    """A LeRobot v2.0 or v2.1 dataset. An empty `images/` directory that writers leave behind is ignored."""

    def __init__(self, root: Path, info: dict[str, Any]) -> None:
        super().__init__(root, info)
        entries = _read_jsonl(root / "meta" / "episodes.jsonl", ("episode_index", "length", "tasks"))
        self._entries = {int(entry["episode_index"]): entry for entry in entries}
        self.indices = tuple(sorted(self._entries))
        expected = info.get("total_episodes", len(self.indices))
        if len(self.indices) != expected:
            raise DatasetError(
                f"{root}/meta/episodes.jsonl: lists {len(self.indices)} episodes, meta/info.json says {expected}"
            )

    def rows(self, index: int) -> Rows:
        path = self._file("data_path", episode_chunk=self._chunk(index), episode_index=index)
        return Rows(path, 0, self._length(index))

    def clip(self, index: int, camera: str) -> tuple[Path, float]:
        path = self._file("video_path", episode_chunk=self._chunk(index), episode_index=index, video_key=camera)
        return path, 0.0

    def episode_tasks(self, index: int) -> list[str]:
        return list(self._entries[index]["tasks"])

    def _length(self, index: int) -> int:
        return int(self._entries[index]["length"])

    def _chunk(self, index: int) -> int:
        return index // int(self.info.get("chunks_size", 1000))

    def _read_tasks(self) -> dict[int, str]:
        entries = _read_jsonl(self.root / "meta" / "tasks.jsonl", ("task_index", "task"))
        return {int(entry["task_index"]): entry["task"] for entry in entries}

    def _metadata_files(self) -> list[Path]:
        return [self.root / "meta" / name for name in ("info.json", "episodes.jsonl", "tasks.jsonl")]


def _read_jsonl(path: Path, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    if not path.is_file():
        raise DatasetError(f"{path}: missing; the dataset was not fully written or copied")
    entries = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            entries.append({key: entry[key] for key in keys})
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise DatasetError(f"{path}, line {number}: truncated or damaged ({error!r})") from None
    return entries
