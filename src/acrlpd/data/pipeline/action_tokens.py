"""Transforms of a policy that writes actions as tokens: tokens of logged chunks, and a count of what is no chunk."""

import dataclasses
import logging
import threading

import numpy as np

from acrlpd.data.pipeline.tokenizer import Tokenizer
from acrlpd.models.families.base import ActionEncoder
from acrlpd.models.fast_decoding import is_undecodable
from acrlpd.models.pi0_fast import END
from acrlpd.robots.base import DataDict

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TokenizeActions:
    """Adds the tokens of the logged chunk, for a policy that writes actions as tokens: "Action: ", the chunk, "|", end.

    Comes after normalisation. A client's data has no actions, and gets no tokens.
    """

    encoder: ActionEncoder
    before: tuple[int, ...]  # ids of the text around the tokens of the chunk
    after: tuple[int, ...]

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
        for row, ids in enumerate(self.encoder.encode(chunks)):
            sequence = [*self.before, *ids, *self.after]
            if len(sequence) > self.encoder.max_len:
                raise ValueError(
                    f"a chunk needs {len(sequence)} tokens, and model.max_action_tokens is {self.encoder.max_len}: a "
                    "policy that learns chunks without their end cannot act. Raise model.max_action_tokens and "
                    "model.max_token_len, or fit a tokenizer on these data (`acrlpd data fast_tokenizer`)"
                )
            tokens[row, : len(sequence)] = sequence
        return {**data, "action_tokens": tokens.reshape(*actions.shape[:-2], -1)}


class ReportUndecodable:
    """Counts chunks whose tokens were no chunk: they are all zeros, and the robot plays the middle of its range."""

    def __init__(self) -> None:
        self.chunks = self.undecodable = 0
        self._next_report = 1
        self._lock = threading.Lock()  # a server calls from several threads

    def __call__(self, data: DataDict) -> DataDict:
        failed = is_undecodable(data["actions"])
        with self._lock:
            self.chunks += failed.size
            self.undecodable += int(failed.sum())
            if self.undecodable >= self._next_report:
                self._next_report = 10 * self.undecodable
                logger.warning(
                    "the policy wrote %d of %d chunks with tokens that are no chunk; zeros are played in their place. "
                    "A policy that has not learned enough does this, and one with model.max_action_tokens too small or "
                    "model.temperature too high (said again at ten times as many)",
                    self.undecodable,
                    self.chunks,
                )
        return data
