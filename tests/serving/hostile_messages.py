"""Messages that are made to cost the server more than they cost their sender, by what is wrong with them."""

import struct
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from acrlpd.serving.message_format import packb

MEGABYTE = 10**6
_STATE = packb(np.zeros(3, np.float32))


def _dict(entries: bytes, number: int) -> bytes:
    return b"\xdf" + struct.pack(">I", number) + entries


def _list(entries: bytes, number: int) -> bytes:
    return b"\xdd" + struct.pack(">I", number) + entries


def _state(packed: bytes) -> bytes:
    """A message with a packed value as its state."""
    return _dict(packb("state") + packed, 1)


def _beside(key: str, packed: bytes) -> bytes:
    """A message with a good state, and a packed value beside the state."""
    return _dict(packb("state") + _STATE + packb(key) + packed, 2)


def _array(dtype: Any, shape: Any, data: Any) -> bytes:
    return msgpack.packb({b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape})


def _lists(number: int, entry: bytes, length: int = 4096) -> bytes:
    return _list(_list(entry * length, length) * number, number)


_FLOAT = b"\xcb" + struct.pack(">d", 1.5)
_KEYS = b"".join(packb(f"key {number}") + b"\xc0" for number in range(4000))

# Each of these has to be refused.
HOSTILE: dict[str, Callable[[], bytes]] = {
    "a list of texts, one of them long": lambda: _state(packb(["x"] * 4000 + ["y" * 100_000])),
    "a short list of long texts": lambda: _state(packb(["x" * 100_000] * 50)),
    "lists of nothing": lambda: _state(_lists(1021, b"\xc0")),
    "lists of numbers": lambda: _state(_lists(790, _FLOAT)),
    "lists of empty lists": lambda: _state(_lists(1000, b"\x90")),
    "a list of a million numbers": lambda: _state(_list(_FLOAT * MEGABYTE, MEGABYTE)),
    "a list of 1000 numbers": lambda: _state(packb([1.5] * 1000)),
    "a list in a list in a list": lambda: _state(b"\x91" * 500_000 + b"\xc0"),
    "long lists, each in the one before": lambda: _state((b"\xdc\x10\x00" + b"\xc0" * 4095) * 1000 + b"\xc0"),
    "dicts, each in the one before": lambda: _state(b"\x81\xa1a" * 500_000 + b"\xc0"),
    "a dict of 4000 keys": lambda: _dict(_KEYS, 4000),
    "dicts of 4000 keys": lambda: _state(_list(_dict(_KEYS, 4000) * 400, 400)),
    "a list that announces four billion entries": lambda: _state(b"\xdd\xff\xff\xff\xff"),
    "a dict that announces four billion entries": lambda: _state(b"\xdf\xff\xff\xff\xff"),
    "a text that announces four gigabytes": lambda: _state(b"\xdb\xff\xff\xff\xff"),
    "an array in place of a key": lambda: _dict(_STATE + b"\xc0", 1),
    "a number in place of a key": lambda: _dict(b"\x01\xc0", 1),
    "an extension": lambda: _beside("x", b"\xd4\x05\x00"),
    "a long extension": lambda: _beside("x", b"\xc9" + struct.pack(">IB", 2 * MEGABYTE, 5) + bytes(2 * MEGABYTE)),
    "a time": lambda: _beside("x", b"\xd6\xff\x00\x00\x00\x01"),
    "a key of 30 MB": lambda: _dict(packb("k" * 30 * MEGABYTE) + b"\xc0", 1),
    "a key of 3 MB of bytes": lambda: _dict(packb(bytes(3 * MEGABYTE)) + b"\xc0", 1),
    "a text of 3 MB": lambda: _beside("prompt", packb("p" * 3 * MEGABYTE)),
    "bytes of 3 MB as state": lambda: _state(packb(bytes(3 * MEGABYTE))),
    "a state of 3 MB": lambda: _state(packb(np.zeros(3 * MEGABYTE // 8))),
    "a text dtype": lambda: _state(_array("U1000000", [1], b"x" * 4)),
    "a long dtype": lambda: _state(_array("f" * 200_000, [1], bytes(4))),
    "a dtype of 3 MB of bytes": lambda: _state(_array(bytes(3 * MEGABYTE), [1], bytes(4))),
    "an object dtype": lambda: _state(_array("|O", [3], bytes(24))),
    "a structured dtype": lambda: _state(_array("i4,i4", [1], bytes(8))),
    "a dtype of nothing": lambda: _state(_array("|V0", [2**40], b"")),
    "a huge shape without elements": lambda: _state(_array("<f4", [0, 2**62, 2**62], b"")),
    "a large shape without elements": lambda: _state(_array("<f4", [2**30, 0], b"")),
    "a shape that does not fit": lambda: _state(_array("<f4", [2**31, 2**31], bytes(12))),
    "a negative shape": lambda: _state(_array("<f4", [-3], bytes(12))),
    "a shape of texts": lambda: _state(_array("<f4", ["x" * 100_000] * 30, bytes(12))),
    "a shape of 900 axes": lambda: _state(_array("<f4", [1] * 900, bytes(4))),
    "numbers that are none": lambda: _state(packb(np.full(3, np.nan, ">f8"))),
    "long doubles that are none": lambda: _state(packb(np.full(3, np.nan, np.longdouble))),
    "images of a text": lambda: _beside("images", packb({"a": "x" * 100_000})),
    "images of lists": lambda: _beside("images", packb({"a": [[["x"] * 3] * 10] * 10})),
    "an image that is not finite": lambda: _beside("images", packb({"a": np.full((3, 300, 300), np.nan)})),
    "an image that is a line": lambda: _beside("images", packb({"a": np.zeros((3, 1, MEGABYTE), np.uint8)})),
    "ninety images": lambda: _beside("images", packb({str(i): np.zeros((3, 64, 64), np.uint8) for i in range(90)})),
}


def honest_message(observation: dict[str, Any], size: int) -> bytes:
    """A good message of at least so many bytes; the server does not read the array that fills the message."""
    return packb(observation | {"filling": np.zeros(size, np.uint8)})
