"""Prompts to token ids: PaliGemma's SentencePiece model, and bytes for small models."""

import abc
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from acrlpd.files import cache_directory

logger = logging.getLogger(__name__)

PALIGEMMA_URL = "https://storage.googleapis.com/big_vision/paligemma_tokenizer.model"
# What happens to a prompt with more tokens than the policy reads: cut with a warning, or refused with a ValueError.
LongPrompts = Literal["cut", "refuse"]
# What follows a prompt that says how good the actions to come are, in the order of `Observation.labelled_prompt`.
LABELS = ("Advantage: negative", "Advantage: positive")
_STATE_BIN_EDGES = np.linspace(-1, 1, 257)[:-1]


class Tokenizer(abc.ABC):
    """The prompt formats of pi0 and pi0.5 over some way to encode text, padded to `max_len` ids."""

    def __init__(self, max_len: int, long_prompts: LongPrompts = "cut") -> None:
        self.max_len = max_len
        self.long_prompts = long_prompts
        self._warned = False

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Ids are below this; a model's embedding table needs as many rows."""

    @abc.abstractmethod
    def encode(self, texts: Sequence[str], *, add_bos: bool) -> list[list[int]]:
        """Ids of each text."""

    def tokenize(
        self, prompts: Sequence[str], states: np.ndarray | None = None, *, fast: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids int32 [n, max_len], padded with 0, and their mask bool [n, max_len].

        Without states the format is pi0's; with normalised states [n, s] it is pi0.5's, which writes the
        state into the text in 256 bins. With `fast` it is the prefix of pi0-FAST: small letters, and no "Action: " at
        its end, which that policy writes itself.
        """
        # One line of text without underscores, as the released weights saw it.
        texts = [prompt.strip().replace("_", " ").replace("\n", " ") for prompt in prompts]
        if states is None:
            # The line break is encoded on its own, so that it cannot merge with the text.
            (newline,) = self.encode(["\n"], add_bos=False)
            encoded = [ids + newline for ids in self.encode(texts, add_bos=True)]
        else:
            bins = [" ".join(map(str, row)) for row in discretize_state(states).tolist()]
            texts, end = ([text.lower() for text in texts], "") if fast else (texts, "Action: ")
            formatted = [f"Task: {text}, State: {state};\n{end}" for text, state in zip(texts, bins, strict=True)]
            encoded = self.encode(formatted, add_bos=True)
        tokens = np.zeros((len(encoded), self.max_len), np.int32)
        mask = np.zeros((len(encoded), self.max_len), bool)
        for row, ids in enumerate(encoded):
            self._check_length(prompts[row], len(ids))
            count = min(len(ids), self.max_len)
            tokens[row, :count] = ids[:count]
            mask[row, :count] = True
        return tokens, mask

    def _check_length(self, prompt: str, length: int) -> None:
        if length <= self.max_len:
            return
        if self.long_prompts == "refuse":
            raise ValueError(f"prompt is too long: the policy reads {self.max_len} tokens, the prompt has {length}")
        if not self._warned:
            self._warned = True
            logger.warning(
                "prompt %r needs %d tokens and is cut to %d; raise model.max_token_len (said once)",
                prompt,
                length,
                self.max_len,
            )


class ByteTokenizer(Tokenizer):
    """One id per UTF-8 byte: needs no file and a vocabulary of only 259, for small models and tests."""

    _BOS = 2
    _FIRST_BYTE = 3

    @property
    def vocab_size(self) -> int:
        return self._FIRST_BYTE + 256

    def encode(self, texts: Sequence[str], *, add_bos: bool) -> list[list[int]]:
        bos = [self._BOS] if add_bos else []
        return [bos + [self._FIRST_BYTE + byte for byte in text.encode()] for text in texts]


class PaligemmaTokenizer(Tokenizer):
    """PaliGemma's SentencePiece model, which the released pi0 and pi0.5 weights need."""

    def __init__(self, max_len: int, long_prompts: LongPrompts, path: Path) -> None:
        super().__init__(max_len, long_prompts)
        import sentencepiece

        if not path.is_file():
            raise FileNotFoundError(
                f"PaliGemma's tokenizer is not at {path}. Get it once with\n"
                f"  {download_command(path)}\n"
                "or set data.tokenizer to the path of paligemma_tokenizer.model "
                "(data.tokenizer=byte needs no file, for models trained from scratch)."
            )
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except RuntimeError as error:  # sentencepiece has no error type of its own
            raise ValueError(
                f"{path} is not a SentencePiece model, truncated or damaged ({error}); PaliGemma's: {PALIGEMMA_URL}"
            ) from None

    @property
    def vocab_size(self) -> int:
        return int(self._processor.vocab_size())

    def encode(self, texts: Sequence[str], *, add_bos: bool) -> list[list[int]]:
        return self._processor.encode(list(texts), add_bos=add_bos)


def add_label(prompt: str, label: str) -> str:
    """The prompt with one of `LABELS`: the text that stock openpi is sent for the same tokens."""
    if prompt.strip().endswith(LABELS):
        raise ValueError(f"the prompt {prompt!r} has its label already; leave the label out, it is added here")
    return f"{prompt.strip()} {label}"


def create_tokenizer(name: str, max_len: int, long_prompts: LongPrompts = "cut") -> Tokenizer:
    """ "byte", "paligemma" (from the cache directory) or the path of a SentencePiece model."""
    if name == "byte":
        return ByteTokenizer(max_len, long_prompts)
    path = default_tokenizer_path() if name == "paligemma" else Path(name)
    return PaligemmaTokenizer(max_len, long_prompts, path)


def default_tokenizer_path() -> Path:
    return cache_directory() / "paligemma_tokenizer.model"


def download_command(path: Path) -> str:
    """The line of a shell that puts PaliGemma's tokenizer there."""
    return f"mkdir -p {shlex.quote(str(path.parent))} && curl -fLo {shlex.quote(str(path))} {PALIGEMMA_URL}"


def discretize_state(state: np.ndarray) -> np.ndarray:
    """Bins 0..255 over [-1, 1]; below is -1, above is 255."""
    return np.digitize(state, _STATE_BIN_EDGES) - 1
