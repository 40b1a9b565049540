"""Fits a FAST tokenizer on the action chunks of a config's dataset."""

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from acrlpd.choice import kind_name
from acrlpd.config import ConfigError, RLTrainConfig
from acrlpd.data.pipeline.config_episodes import open_config_source, read_columns, read_windows
from acrlpd.data.pipeline.config_norm_stats import load_config_norm_stats
from acrlpd.data.pipeline.transforms import Normalize, uses_quantiles
from acrlpd.data.sources.source import ColumnTable
from acrlpd.files import new_directory
from acrlpd.models.fast_tokenizer import TOKENIZER_FILE, FASTTokenizer, fit_fast_tokenizer

# Chunks from which byte pairs are merged; more of them change the tokens little.
_MOST_CHUNKS = 100_000
# Chunks that are written with the new tokenizer, to say how many tokens they take.
_MOST_TRIED = 20_000
_BLOCK = 4_096
# Ids of the text around a chunk, at most: one for each letter of "Action: |", and the end.
_TEXT_TOKENS = 10


@dataclasses.dataclass(frozen=True)
class FitReport:
    """What a tokenizer makes of the chunks of its dataset."""

    tokenizer: FASTTokenizer
    num_chunks: int  # that the tokenizer was fitted on
    largest_action: float  # of all chunks, normalised
    mean_tokens: float
    most_tokens: int
    largest_error: float  # of an action after writing and reading, normalised

    @property
    def needed_tokens(self) -> int:
        """The smallest `model.max_action_tokens` for these chunks, whatever tokenizer the text has."""
        return self.most_tokens + _TEXT_TOKENS


def fit_config_tokenizer(
    rl_config: RLTrainConfig, output: Path, *, vocab_size: int, scale: float, overwrite: bool
) -> FitReport:
    """Fits a tokenizer on the normalised chunks of all episodes, and writes its directory once it is complete."""
    model = rl_config.model
    if not model.samples_tokens:
        raise ConfigError(
            f"the {kind_name(model)} policy of this config reads actions as numbers; a FAST tokenizer is for model "
            "pi0_fast: add --model pi0_fast, or name such a preset, for example --config pi0_fast_libero"
        )
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists already; name another directory, or add --overwrite")
    norm_stats = load_config_norm_stats(rl_config.data)
    normalize = Normalize(norm_stats, use_quantiles=uses_quantiles(rl_config))
    table = read_columns(open_config_source(rl_config), rl_config.data, rewards=False)
    every = -(-table.num_rows // _MOST_CHUNKS)
    kept, largest = [], 0.0
    for first, chunks in _read_chunks(table, rl_config, normalize):
        largest = max(largest, float(np.abs(chunks).max()))
        kept.append(chunks[-first % every :: every])
    chunks = np.concatenate(kept)
    tokenizer = fit_fast_tokenizer(chunks, vocab_size=vocab_size, scale=scale, largest_action=largest, name=str(output))
    report = _try(tokenizer, chunks, largest)
    with new_directory(output) as partial:
        tokenizer.save(partial, action_dim=model.action_dim, time_horizon=model.action_horizon)
        if output.exists():
            _require_tokenizer(output)
            shutil.rmtree(output)
    return report


def _read_chunks(
    table: ColumnTable, rl_config: RLTrainConfig, normalize: Normalize
) -> Iterator[tuple[int, np.ndarray]]:
    """Normalised chunks [n, T, a] of all windows in blocks, and the number of the first window of each block."""
    for first in range(0, table.num_rows, _BLOCK):
        rows = np.arange(first, min(first + _BLOCK, table.num_rows))
        yield first, normalize(read_windows(table, rl_config, rows))["actions"]


def _try(tokenizer: FASTTokenizer, chunks: np.ndarray, largest: float) -> FitReport:
    tried = chunks[:: -(-len(chunks) // _MOST_TRIED)]
    encoded = tokenizer.encode(tried)
    error = 0.0
    for chunk, ids in zip(tried, encoded, strict=True):
        decoded = tokenizer.decode(ids, *chunk.shape)
        assert decoded is not None, "a tokenizer reads what it has written"
        error = max(error, float(np.abs(decoded - chunk).max()))
    counts = [len(ids) for ids in encoded]
    return FitReport(tokenizer, len(chunks), largest, float(np.mean(counts)), max(counts), error)


def _require_tokenizer(directory: Path) -> None:
    """Refuses to remove a directory that holds anything else."""
    if not (directory / TOKENIZER_FILE).is_file():
        raise ConfigError(f"{directory} is not a tokenizer ({TOKENIZER_FILE} is missing), so it is not overwritten")
