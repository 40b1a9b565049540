"""openpi's wire format: msgpack, in which a NumPy array is a map with bytes keys.

Messages come from the network, so decoding checks everything. An array is made only of plain numbers, and only if
dtype, shape and number of bytes agree. An array that holds one text, such as a prompt may be, becomes that text. The
number of elements of a message is bounded, and an element is counted before it is made: a byte of a message can become
a hundred bytes in Python, and no client gets an answer while they are made.
"""

import io
import math
import re
from typing import Any

import msgpack
import numpy as np

_PLAIN_DTYPE = re.compile(r"[<>|=]?[biuf][0-9]{1,2}")
# NumPy keeps a text as UTF-32, filled up with zeros.
_TEXT_DTYPE = re.compile(r"[<>]U[0-9]{1,6}")
_MAX_DIMS = 32
_MAX_SIZE = 2**31  # of one axis; an array without elements may state any
# An array has about ten elements: keys, values, and its sizes. The longest list of numbers is a little shorter than
# this. A thousand elements are read within a millisecond.
_MAX_ELEMENTS = 1024
_MAX_DEPTH = 8
_MAX_TEXT_BYTES = 2**18
_MAX_KEY_LENGTH = 128

# The first byte of a msgpack element says what the element is.
_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_LISTS = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
_EXTENSIONS = frozenset((0xC7, 0xC8, 0xC9, *range(0xD4, 0xD9)))


class MessageError(ValueError):
    """Bytes that are not a message."""


def shortened(text: str | bytes, length: int = 100) -> str:
    """What a client sent, for a message about it. A client may send a name of megabytes."""
    return str(text) if len(text) <= length else f"{text[:length]!s}... ({len(text)} characters)"


def packb(message: Any) -> bytes:
    return msgpack.packb(message, default=_encode)


def unpackb(data: bytes) -> Any:
    """The message in `data`; its arrays are read-only."""
    try:
        reader = _Reader(data)
        message = reader.read()
        reader.check_end()
    except MessageError:
        raise
    # msgpack has its own errors for most faults, and raises plain Python errors for bad strings and keys.
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise MessageError(f"the message is not valid msgpack ({shortened(reason)})") from error
    return message


class _Reader:
    """Reads a message element by element. msgpack's own loop would make everything before it could be counted.

    msgpack's loop would also intern every key, and the first versions of Python 3.12 never free an interned text.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._elements = 0
        self._unpacker = msgpack.Unpacker(
            io.BytesIO(data),
            read_size=min(len(data), 2**16),
            max_buffer_size=max(len(data), 1),
            max_str_len=_MAX_TEXT_BYTES,
        )

    def read(self, depth: int = 0) -> Any:
        """The next element with all that it holds."""
        first = self._first_byte()
        if first in _MAPS:
            number = self._unpacker.read_map_header()
            self._count(2 * number, depth)
            return _decode({self._read_key(): self.read(depth + 1) for _ in range(number)})
        if first in _LISTS:
            number = self._unpacker.read_array_header()
            self._count(number, depth)
            return [self.read(depth + 1) for _ in range(number)]
        if first in _EXTENSIONS:
            raise MessageError("the message has an extension type of msgpack; send numbers, text, arrays, lists, dicts")
        return self._unpacker.unpack()

    def check_end(self) -> None:
        if self._unpacker.tell() != len(self._data):
            raise MessageError(f"the message goes on after its end at byte {self._unpacker.tell()}")

    def _read_key(self) -> str | bytes:
        first = self._first_byte()
        key = None if first in _MAPS | _LISTS | _EXTENSIONS else self._unpacker.unpack()
        if not isinstance(key, (str, bytes)):
            raise MessageError("the keys of a dict must be text")
        if len(key) > _MAX_KEY_LENGTH:
            raise MessageError(
                f"a key must have at most {_MAX_KEY_LENGTH} characters; found {len(key)}: {shortened(key)}"
            )
        return key

    def _first_byte(self) -> int:
        position = self._unpacker.tell()
        if position >= len(self._data):
            raise MessageError(f"the message is cut off after {len(self._data)} bytes")
        return self._data[position]

    def _count(self, number: int, depth: int) -> None:
        self._elements += number
        if self._elements > _MAX_ELEMENTS:
            raise MessageError(
                f"the message has more than {_MAX_ELEMENTS} keys and values; send numbers as arrays, not as lists"
            )
        if depth >= _MAX_DEPTH:
            raise MessageError(f"the message has dicts and lists more than {_MAX_DEPTH} deep")


def _encode(value: Any) -> Any:
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"a message cannot hold {type(value).__name__}")
    if value.dtype.kind in "VOc":
        raise TypeError(f"a message cannot hold arrays of {value.dtype}")
    if isinstance(value, np.ndarray):
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _decode(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return _decode_text(value) if _is_text(value.get(b"dtype")) else _decode_array(value)
    if b"__npgeneric__" in value:
        return _decode_scalar(value)
    return value


def _decode_array(value: dict[Any, Any]) -> np.ndarray:
    dtype, data, shape = _decode_dtype(value), value.get(b"data"), value.get(b"shape")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_size, shape)):
        raise MessageError(f"an array's shape must be a list of at most {_MAX_DIMS} sizes, each below {_MAX_SIZE}")
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise MessageError(f"an array of {dtype} {shape} does not fit its data of {size}")
    return np.ndarray(shape, dtype, data)


def _is_text(dtype: Any) -> bool:
    return isinstance(dtype, str) and _TEXT_DTYPE.fullmatch(dtype) is not None


def _decode_text(value: dict[Any, Any]) -> str:
    """The text of an array of one element, as in openpi, whose policy asks a prompt for its `item()`."""
    dtype, data, shape = value[b"dtype"], value.get(b"data"), value.get(b"shape")
    if not isinstance(shape, list) or any(size != 1 for size in shape) or len(shape) > _MAX_DIMS:
        raise MessageError("an array of texts must hold one text")
    size = 4 * int(dtype[2:])  # bytes
    if not isinstance(data, bytes) or len(data) != size or size > _MAX_TEXT_BYTES:
        raise MessageError(f"an array of {dtype} must have {size} bytes of data, and at most {_MAX_TEXT_BYTES}")
    return data.decode("utf-32-le" if dtype[0] == "<" else "utf-32-be").rstrip("\0")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


def _decode_scalar(value: dict[Any, Any]) -> np.generic:
    dtype, data = _decode_dtype(value), value.get(b"data")
    if not isinstance(data, (bool, int, float)):
        raise MessageError(f"a NumPy scalar must be a number; found {type(data).__name__}")
    return dtype.type(data)


def _decode_dtype(value: dict[Any, Any]) -> np.dtype:
    name = value.get(b"dtype")
    if not isinstance(name, str) or not _PLAIN_DTYPE.fullmatch(name):
        found = shortened(name) if isinstance(name, str) else type(name).__name__
        raise MessageError(f"arrays must be of plain numbers such as '<f4' or '|u1', or one text; found dtype {found}")
    return np.dtype(name)
