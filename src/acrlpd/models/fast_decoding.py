"""From sampled tokens back to action chunks, on the devices: `FASTTokenizer.decode` as array operations.

Acting, targets and advantages need actions in the middle of a compiled program, so nothing goes to the host here. The
tokens of a chunk are looked up in one array of bytes, the bytes are read as UTF-8, and the numbers of the characters
are the coefficients of the chunk.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.fft

from acrlpd.models.fast_tokenizer import load_fast_tokenizer

# openpi gives FAST tokens the last ids of the language model's vocabulary, the last 128 excepted.
_SKIPPED_IDS = 128
_MOST_BYTES = 3  # of one character


@dataclasses.dataclass(frozen=True, eq=False)
class _Vocabulary:
    """The bytes of all tokens one after the other, and where each token begins."""

    text: np.ndarray  # uint8 [all bytes]
    starts: np.ndarray  # int32 [tokens]
    lengths: np.ndarray  # int32 [tokens]


@functools.lru_cache(maxsize=8)
def _vocabulary(name: str) -> _Vocabulary:
    tokens = load_fast_tokenizer(name).token_bytes
    lengths = np.array([len(token) for token in tokens], np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int32)
    return _Vocabulary(np.frombuffer(b"".join(tokens), np.uint8), starts, lengths)


def to_language_ids(fast_ids: np.ndarray | jax.Array, vocab_size: int) -> np.ndarray | jax.Array:
    """Ids of FAST tokens as ids of a language model with this vocabulary; the map is its own inverse."""
    return vocab_size - 1 - _SKIPPED_IDS - fast_ids


def first_action_id(fast_vocab_size: int, vocab_size: int) -> int:
    """The lowest id that stands for a FAST token; text must stay below."""
    return vocab_size - _SKIPPED_IDS - fast_vocab_size


def decode_tokens(
    tokens: jax.Array, *, fast_tokenizer: str, vocab_size: int, action_horizon: int, action_dim: int
) -> jax.Array:
    """Chunks [..., T, a] of sampled ids [..., l] of the language model.

    The chunk is the first run of FAST tokens: openpi's "Action: " stands before it and its "|" behind it. Ids that are
    no chunk of this size give zeros, as in openpi.
    """
    vocabulary, tokenizer = _vocabulary(fast_tokenizer), load_fast_tokenizer(fast_tokenizer)
    inverse = scipy.fft.idct(np.eye(action_horizon), axis=0, norm="ortho").astype(np.float32)

    def decode(tokens: jax.Array) -> jax.Array:
        ids = to_language_ids(tokens, vocab_size)
        is_action = (ids >= 0) & (ids < len(vocabulary.lengths))
        over = jnp.cumsum(~is_action & (jnp.cumsum(is_action) > 0)) > 0
        text, size = _bytes(
            vocabulary, jnp.where(is_action & ~over, ids, -1), _MOST_BYTES * action_horizon * action_dim
        )
        codes, is_text = _read_utf8(text, size, action_horizon * action_dim)
        coefficients = (codes + tokenizer.min_token).reshape(action_horizon, action_dim) / tokenizer.scale
        chunk = jnp.einsum("tk,ka->ta", inverse, coefficients, precision=jax.lax.Precision.HIGHEST)
        return jnp.where(is_text, chunk, 0.0)

    flat = jax.vmap(decode)(tokens.reshape(-1, tokens.shape[-1]))
    return flat.reshape(*tokens.shape[:-1], action_horizon, action_dim)


def is_undecodable(chunks: np.ndarray) -> np.ndarray:
    """Whether chunks [..., T, a] of `decode_tokens` are the zeros that stand for ids that are no chunk: bool [...]."""
    return np.all(np.asarray(chunks) == 0, axis=(-2, -1))


def _bytes(vocabulary: _Vocabulary, ids: jax.Array, room: int) -> tuple[jax.Array, jax.Array]:
    """The bytes of tokens [l], of which -1 is none, as int32 [room], and their number, which may exceed the room."""
    token = jnp.maximum(ids, 0)
    ends = jnp.cumsum(jnp.where(ids >= 0, jnp.asarray(vocabulary.lengths)[token], 0))
    places = jnp.arange(room)
    which = jnp.minimum(jnp.sum(ends <= places[:, None], axis=1), len(ids) - 1)
    within = places - (ends - jnp.asarray(vocabulary.lengths)[token])[which]
    index = jnp.asarray(vocabulary.starts)[token[which]] + within
    text = jnp.asarray(vocabulary.text)[jnp.clip(index, 0, len(vocabulary.text) - 1)].astype(jnp.int32)
    return jnp.where(places < ends[-1], text, 0), ends[-1]


def _read_utf8(text: jax.Array, size: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The codes [count] of the first `size` bytes of text [l], and whether these are exactly `count` characters."""
    inside = jnp.arange(len(text)) < size
    second, third = (jnp.append(text[shift:], jnp.zeros(shift, text.dtype)) for shift in (1, 2))
    follows = (text & 0xC0) == 0x80
    of_one, of_two, of_three = text < 0x80, (text & 0xE0) == 0xC0, (text & 0xF0) == 0xE0
    codes = jnp.select(
        [of_one, of_two],
        [text, (text & 0x1F) << 6 | (second & 0x3F)],
        (text & 0x0F) << 12 | (second & 0x3F) << 6 | (third & 0x3F),
    )
    # A character must have as many bytes as its first byte says, and no more bytes than it needs.
    second_follows, third_follows = (second & 0xC0) == 0x80, (third & 0xC0) == 0x80
    is_whole = jnp.select(
        [of_one, of_two, of_three],
        [
            jnp.ones_like(inside),
            second_follows & (codes >= 0x80),
            second_follows & third_follows & (codes >= 0x800) & ((codes < 0xD800) | (codes > 0xDFFF)),
        ],
        False,
    )
    begins = inside & ~follows
    num_following = jnp.sum(jnp.where(begins, 1 * of_two + 2 * of_three, 0))
    is_text = (
        jnp.all(is_whole | ~begins)
        & (num_following == jnp.sum(inside & follows))
        & (jnp.sum(begins) == count)
        & (size <= len(text))
        & ~follows[0]
    )
    place = jnp.where(begins, jnp.cumsum(begins) - 1, count)
    return jnp.zeros(count, codes.dtype).at[place].set(codes, mode="drop"), is_text
