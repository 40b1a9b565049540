"""Transforms of a policy that writes actions as tokens: tokens of logged chunks, and a count of what is no chunk."""

import dataclasses
import logging
import threading
from collections.abc import Sequence

import numpy as np

from acrlpd.data.pipeline.tokenizer import Tokenizer
from acrlpd.models.families.base import ActionEncoder
from acrlpd.models.fast_decoding import is_undecodable
from acrlpd.models.fast_tokenizer import FASTTokenizerError
from acrlpd.models.pi0_fast import END
from acrlpd.robots.base import DataDict

logger = logging.getLogger(__name__)


class FailureCount:
    """How many chunks of how many failed. A warning is due at the first failure, and then at ten times as many."""

    def __init__(self) -> None:
        self.chunks = self.failed = 0
        self._next_report = 1
        self._lock = threading.Lock()  # loaders and servers have several threads

    def add(self, chunks: int, failed: int) -> bool:
        """Counts, and says whether a warning is due."""
        with self._lock:
            self.chunks += chunks
            self.failed += failed
            is_due = self.failed >= self._next_report
            if is_due:
                self._next_report = 10 * self.failed
            return is_due


@dataclasses.dataclass(frozen=True)
class TokenizeActions:
    """Adds the tokens of the logged chunk, for a policy that writes actions as tokens: "Action: ", the chunk, "|", end.

    Comes after normalisation. A client's data has no actions, and gets no tokens. A chunk that cannot be written gets
    none either: the policy does not learn from this chunk, while critics do. One outlier among millions of windows, or
    among those that the policy plays itself, must not end a run. The start of a run is strict, by `write`.
    """

    encoder: ActionEncoder
    before: tuple[int, ...]  # ids of the text around the tokens of the chunk
    after: tuple[int, ...]
    count: FailureCount = dataclasses.field(default_factory=FailureCount)

    @classmethod
    def create(cls, encoder: ActionEncoder, tokenizer: Tokenizer) -> "TokenizeActions":
        before, after = tokenizer.encode(["Action: ", "|"], add_bos=False)
        return cls(encoder, tuple(before), (*after, END))

    def __call__(self, data: DataDict) -> DataDict:
        if "actions" not in data:
            return data
        actions = np.asarray(data["actions"])
        chunks = actions.reshape(-1, *actions.shape[-2:])
        tokens = np.zeros((len(chunks), self.encoder.max_len), np.int32)
        for row, sequence in enumerate(self._write_what_can_be_written(chunks)):
            tokens[row, : len(sequence)] = sequence
        return {**data, "action_tokens": tokens.reshape(*actions.shape[:-2], -1)}

    def write(self, chunks: np.ndarray) -> list[tuple[int, ...]]:
        """The tokens of each of the normalised chunks [n, T, a]; an error if one of them cannot be written."""
        sequences = [(*self.before, *ids, *self.after) for ids in self.encoder.encode(chunks)]
        lengths = np.array([len(sequence) for sequence in sequences])
        too_long = lengths > self.encoder.max_len
        if too_long.any():
            raise FASTTokenizerError(
                f"{too_long.sum()} of {len(chunks)} chunks need up to {lengths.max()} tokens, and "
                f"model.max_action_tokens is {self.encoder.max_len}: a policy that learns chunks without their end "
                "cannot act. Raise model.max_action_tokens and model.max_token_len, or fit a tokenizer on these data "
                "(`acrlpd data fast_tokenizer`)"
            )
        return sequences

    def _write_what_can_be_written(self, chunks: np.ndarray) -> Sequence[tuple[int, ...]]:
        try:
            sequences = self.write(chunks)
            self.count.add(len(chunks), 0)
            return sequences
        except FASTTokenizerError as error:
            reason = error
        sequences = []
        for chunk in chunks:
            try:
                sequences += self.write(chunk[None])
            except FASTTokenizerError:
                sequences.append(())
        if self.count.add(len(chunks), sequences.count(())):
            logger.warning(
                "%d of %d chunks of the data could not be written as tokens, and the policy does not learn from them. "
                "The last one: %s (said again at ten times as many)",
                self.count.failed,
                self.count.chunks,
                reason,
            )
        return sequences


class ReportUndecodable:
    """Counts chunks whose tokens were no chunk: they are all zeros, and the robot plays the middle of its range."""

    def __init__(self) -> None:
        self.count = FailureCount()

    def __call__(self, data: DataDict) -> DataDict:
        failed = is_undecodable(data["actions"])
        if self.count.add(failed.size, int(failed.sum())):
            logger.warning(
                "the policy wrote %d of %d chunks with tokens that are no chunk; zeros are played in their place. A "
                "policy that has not learned enough does this, and one with model.max_action_tokens too small or "
                "model.temperature too high (said again at ten times as many)",
                self.count.failed,
                self.count.chunks,
            )
        return data
