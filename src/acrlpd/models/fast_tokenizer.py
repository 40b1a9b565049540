"""FAST: action chunks as a few tokens, by a discrete cosine transform and byte pairs (arXiv 2501.09747).

A chunk [T, a] is transformed along time, multiplied with `scale` and rounded. The whole numbers, low frequencies first,
are written as characters, and the UTF-8 bytes of these characters are merged into tokens. Nothing but the rounding is
lost: a coefficient is off by at most 1 / (2 scale).

A tokenizer is a directory in the format of Hugging Face's `physical-intelligence/fast`: tokenizer.json of the
`tokenizers` library, and processor_config.json with scale, min_token and sizes.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.fft

from acrlpd.files import cache_directory
from acrlpd.installation import install_command

TOKENIZER_FILE = "tokenizer.json"
PROCESSOR_FILE = "processor_config.json"
RELEASED_URL = "https://huggingface.co/physical-intelligence/fast/resolve/main/"
# Names that are no directory: the released tokenizer in the cache directory, and one token for each byte.
RELEASED, BYTE = "released", "byte"
# Characters beyond this have no code of at most three bytes, and the codes between these two are no characters.
_LARGEST_CODE, _SURROGATES = 0xFFFF, (0xD800, 0xDFFF)
# A fitted tokenizer holds actions that are this many times as large as the largest action it has seen.
_MARGIN = 1.5
_LONGEST_TOKEN = 10_000  # characters, as in the public processor


class FASTTokenizerError(ValueError):
    """A tokenizer cannot be read, or a chunk cannot be written with it; the message says why."""


@dataclasses.dataclass(frozen=True, eq=False)
class FASTTokenizer:
    """A tokenizer of action chunks. `definition` is the text of its tokenizer.json."""

    definition: str = dataclasses.field(repr=False)
    scale: float
    min_token: int  # the lowest coefficient: the coefficient of the character 0
    name: str  # for messages

    @functools.cached_property
    def token_bytes(self) -> tuple[bytes, ...]:
        """The bytes that each token stands for, by its id; an id without token stands for none."""
        vocabulary = json.loads(self.definition)["model"]["vocab"]
        tokens = [b""] * (1 + max(vocabulary.values()))
        for text, number in vocabulary.items():
            tokens[number] = _to_bytes(text)
        return tuple(tokens)

    @property
    def vocab_size(self) -> int:
        return len(self.token_bytes)

    def largest_action(self, horizon: int) -> float:
        """Chunks of this many steps whose actions are nowhere larger can all be written.

        A coefficient is not larger than the length of the vector of its `horizon` actions.
        """
        return -self.min_token / (self.scale * math.sqrt(horizon))

    def encode(self, chunks: np.ndarray) -> list[list[int]]:
        """The token ids of normalised chunks [n, T, a]; an error for a chunk that cannot be written exactly."""
        codes = quantize(chunks, self.scale) - self.min_token
        self._refuse_codes(chunks, codes)
        return [encoding.ids for encoding in self._bpe.encode_batch(_to_texts(codes), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], horizon: int, action_dim: int) -> np.ndarray | None:
        """The chunk [T, a] of token ids; None where the ids are no such chunk. `decode_tokens` does this on devices."""
        if any(not 0 <= number < self.vocab_size for number in ids):
            return None
        try:
            text = b"".join(self.token_bytes[number] for number in ids).decode()
        except UnicodeDecodeError:
            return None
        if len(text) != horizon * action_dim:
            return None
        coefficients = np.array([ord(character) for character in text]) + self.min_token
        return scipy.fft.idct(coefficients.reshape(horizon, action_dim) / self.scale, axis=0, norm="ortho")

    def save(self, directory: Path, *, action_dim: int | None = None, time_horizon: int | None = None) -> None:
        """Writes the directory's two files, as the public processor reads them."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files(action_dim=action_dim, time_horizon=time_horizon).items():
            (directory / name).write_bytes(content)

    def files(self, *, action_dim: int | None = None, time_horizon: int | None = None) -> dict[str, bytes]:
        """The content of the directory's files."""
        processor = {
            "action_dim": action_dim,
            "auto_map": {"AutoProcessor": "processing_action_tokenizer.UniversalActionProcessor"},
            "min_token": self.min_token,
            "processor_class": "UniversalActionProcessor",
            "scale": self.scale,
            "time_horizon": time_horizon,
            "vocab_size": self.vocab_size,
        }
        return {
            TOKENIZER_FILE: self.definition.encode(),
            PROCESSOR_FILE: (json.dumps(processor, indent=2) + "\n").encode(),
        }

    @functools.cached_property
    def _bpe(self) -> Any:
        try:
            return _tokenizers().Tokenizer.from_str(self.definition)
        except Exception as error:  # the library raises plain Exception
            raise FASTTokenizerError(f"{self.name}: {TOKENIZER_FILE} is damaged: {error}") from None

    @functools.cached_property
    def _known_bytes(self) -> frozenset[int]:
        """The bytes that have a token of their own; the others can be written in no way that is sure."""
        return frozenset(token[0] for token in self.token_bytes if len(token) == 1)

    def _refuse_codes(self, chunks: np.ndarray, codes: np.ndarray) -> None:
        """Raises an error that names the first number of chunks [n, T, a] that has no character, or no token."""
        refused = [code for code in np.unique(codes).tolist() if not self._has_tokens(code)]
        if not refused:
            return
        chunk, frequency, dim = np.argwhere(np.isin(codes, refused) | np.isnan(codes))[0]
        values = chunks[chunk, :, dim]
        coefficient = codes[chunk, frequency, dim] + self.min_token
        raise FASTTokenizerError(
            f"action dim {dim} is out of the range of the FAST tokenizer {self.name}: a chunk reaches "
            f"{values[np.argmax(np.abs(values))]:.4g} there (normalised), with the coefficient {coefficient:g} at "
            f"frequency {frequency}. Coefficients begin at {self.min_token}, which is enough for actions between "
            f"{-self.largest_action(len(values)):.3g} and {self.largest_action(len(values)):.3g}. Fit the tokenizer on "
            "these data (`acrlpd data fast_tokenizer`), or look for outliers and wrong norm statistics "
            "(`acrlpd data inspect`)"
        )

    def _has_tokens(self, code: float) -> bool:
        if not 0 <= code <= _LARGEST_CODE or _SURROGATES[0] <= code <= _SURROGATES[1]:  # NaN is refused here, too
            return False
        return self._known_bytes.issuperset(chr(int(code)).encode())


def quantize(chunks: np.ndarray, scale: float) -> np.ndarray:
    """Coefficients of chunks [n, T, a], rounded, as whole floating-point numbers of the same shape."""
    return np.around(scipy.fft.dct(np.asarray(chunks, np.float64), axis=1, norm="ortho") * scale)


def fit_fast_tokenizer(
    chunks: np.ndarray, *, vocab_size: int, scale: float = 10.0, largest_action: float | None = None, name: str = "new"
) -> FASTTokenizer:
    """Merges byte pairs that are frequent in normalised chunks [n, T, a] until there are `vocab_size` tokens.

    The tokenizer holds somewhat larger actions than `largest_action`, by default the largest of the chunks.
    """
    library = _tokenizers()
    if vocab_size < 256:
        raise FASTTokenizerError(f"a FAST tokenizer has a token for each of the 256 bytes; found {vocab_size} tokens")
    if not np.isfinite(chunks).all():
        dim = int(np.argwhere(~np.isfinite(chunks))[0][-1])
        raise FASTTokenizerError(f"action dim {dim} has numbers that are not finite; correct the data")
    seen = float(np.abs(chunks).max()) if largest_action is None else largest_action
    min_token = -math.ceil(scale * _MARGIN * max(seen, 1.0) * math.sqrt(chunks.shape[1]))
    if -2 * min_token > _LARGEST_CODE:
        dim = int(np.argmax(np.abs(chunks).max(axis=(0, 1))))
        raise FASTTokenizerError(
            f"action dim {dim} reaches {seen:.4g} after normalisation, too much for a FAST tokenizer: look for "
            "outliers or a dim that hardly moves (`acrlpd data inspect`), and correct the data or the norm statistics"
        )
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=_LONGEST_TOKEN,
    )
    bpe.train_from_iterator(_to_texts(quantize(chunks, scale) - min_token), trainer)
    return FASTTokenizer(bpe.to_str(), scale, min_token, name)


@functools.lru_cache(maxsize=8)
def load_fast_tokenizer(name: str) -> FASTTokenizer:
    """The tokenizer of a directory; "released": in the cache directory; "byte": one token for each byte."""
    if name == BYTE:
        return _byte_tokenizer()
    directory = released_directory() if name == RELEASED else Path(name).expanduser()
    if not (directory / TOKENIZER_FILE).is_file():
        how = f"Get it once with\n  {download_command(directory)}\n" if name == RELEASED else "Make it with "
        raise FileNotFoundError(
            f"there is no FAST tokenizer in {directory}: expected {TOKENIZER_FILE}. {how}"
            "`acrlpd data fast_tokenizer --config ... --output DIR`, and set model.fast_tokenizer to the directory "
            "(model.fast_tokenizer=byte needs no file, for models trained from scratch)"
        )
    return read_fast_tokenizer({path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}, name)


def read_fast_tokenizer(files: Mapping[str, bytes], name: str) -> FASTTokenizer:
    """The tokenizer that these files of a directory describe."""
    try:
        definition = files[TOKENIZER_FILE].decode()
        processor = json.loads(files[PROCESSOR_FILE])
        model = json.loads(definition)["model"]
        scale, min_token = float(processor["scale"]), processor["min_token"]
        usable = model.get("type") == "BPE" and bool(model["vocab"]) and scale > 0 and isinstance(min_token, int)
    except (KeyError, TypeError, ValueError) as error:
        raise FASTTokenizerError(
            f"{name} is not a FAST tokenizer, or its files are damaged ({type(error).__name__}: {error}); expected "
            f"{TOKENIZER_FILE} and {PROCESSOR_FILE}, as Hugging Face's physical-intelligence/fast has them"
        ) from None
    if not usable:
        raise FASTTokenizerError(
            f"{name} is not a FAST tokenizer: expected a BPE model with a vocabulary in {TOKENIZER_FILE}, and a "
            f"positive scale and a whole min_token in {PROCESSOR_FILE}; found {model.get('type')}, {scale} and "
            f"{min_token!r}"
        )
    return FASTTokenizer(definition, scale, min_token, name)


def released_directory() -> Path:
    return cache_directory() / "fast_tokenizer"


def download_command(directory: Path) -> str:
    """The line of a shell that puts the released tokenizer there."""
    urls = " ".join(f"-O {RELEASED_URL}{name}" for name in (TOKENIZER_FILE, PROCESSOR_FILE))
    return f"mkdir -p {directory} && cd {directory} && curl -fL {urls}"


def _byte_tokenizer() -> FASTTokenizer:
    """A tokenizer without merges: coefficients from -64 to 63 take one token each, larger ones take two or three."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    definition = {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}
    return FASTTokenizer(json.dumps(definition), 10.0, -64, BYTE)


@functools.cache
def _byte_characters() -> tuple[str, ...]:
    """The printable character by which byte-level BPE writes each byte down.

    Bytes that are printable in Latin-1 stand for themselves, the others for the characters from 256 on, in their order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


def _to_bytes(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary; a token with any other character is meant as it is written."""
    known = {character: byte for byte, character in enumerate(_byte_characters())}
    if all(character in known for character in token):
        return bytes(known[character] for character in token)
    return token.encode()


def _to_texts(codes: np.ndarray) -> list[str]:
    """Codes [n, T, a] as n texts of one character for each number."""
    rows: Iterable[list[int]] = codes.reshape(len(codes), -1).astype(np.int64).tolist()
    return ["".join(map(chr, row)) for row in rows]


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise FASTTokenizerError(
            f"writing FAST tokens needs the package tokenizers; install it: {install_command('fast')}"
        ) from None
    return tokenizers
