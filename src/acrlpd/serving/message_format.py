"""openpi's wire format: msgpack, in which a NumPy array is a map with bytes keys.

Messages come from the network, so decoding checks everything. An array is made only of plain numbers, and only if
dtype, shape and number of bytes agree. The number of dicts and lists in a message is bounded.
"""

import itertools
import math
import re
from typing import Any

import msgpack
import numpy as np

_PLAIN_DTYPE = re.compile(r"[<>|=]?[biuf][0-9]{1,2}")
_MAX_DIMS = 32
# An empty list takes one byte in a message and 56 bytes in Python. A message full of empty lists would take gigabytes
# of memory, and seconds in which no other thread runs and no client gets an answer.
_MAX_CONTAINERS = 1024  # an array counts as two
_MAX_LENGTH = 4096


class MessageError(ValueError):
    """Bytes that are not a message."""


def packb(message: Any) -> bytes:
    return msgpack.packb(message, default=_encode)


def unpackb(data: bytes) -> Any:
    """The message in `data`; its arrays are read-only views of `data`."""
    containers = itertools.count(1)

    def counted(value: Any) -> Any:
        if next(containers) > _MAX_CONTAINERS:
            raise MessageError(f"the message has more than {_MAX_CONTAINERS} dicts and lists; send numbers as arrays")
        return value

    try:
        return msgpack.unpackb(
            data,
            object_hook=lambda value: counted(_decode(value)),
            list_hook=counted,
            max_array_len=_MAX_LENGTH,
            max_map_len=_MAX_LENGTH,
        )
    except MessageError:
        raise
    # msgpack has its own errors for most faults, and raises plain Python errors for bad strings and keys.
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise MessageError(f"the message is not valid msgpack ({reason})") from error


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
        return _decode_array(value)
    if b"__npgeneric__" in value:
        return _decode_scalar(value)
    return value


def _decode_array(value: dict[Any, Any]) -> np.ndarray:
    dtype, data, shape = _decode_dtype(value), value.get(b"data"), value.get(b"shape")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
        raise MessageError(f"an array's shape must be a list of sizes; found {str(shape)[:100]}")
    if not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        size = f"{len(data)} bytes" if isinstance(data, bytes) else type(data).__name__
        raise MessageError(f"an array of {dtype} {shape} does not fit its data of {size}")
    return np.ndarray(shape, dtype, data)


def _decode_scalar(value: dict[Any, Any]) -> np.generic:
    dtype, data = _decode_dtype(value), value.get(b"data")
    if not isinstance(data, (bool, int, float)):
        raise MessageError(f"a NumPy scalar must be a number; found {type(data).__name__}")
    return dtype.type(data)


def _decode_dtype(value: dict[Any, Any]) -> np.dtype:
    name = value.get(b"dtype")
    if not isinstance(name, str) or not _PLAIN_DTYPE.fullmatch(name):
        raise MessageError(f"arrays must be of plain numbers such as '<f4' or '|u1'; found dtype {str(name)[:100]}")
    return np.dtype(name)
