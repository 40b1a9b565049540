"""The wire format is openpi's, byte for byte, and decoding refuses everything that is not a message."""

import sys
import tracemalloc
import uuid

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from small_checkpoints import GOLDENS

from acrlpd.serving.message_format import MessageError, packb, unpackb

OPENPI_EXAMPLE = {
    "state": np.arange(3, dtype=np.float32),
    "images": {"cam_high": np.arange(12, dtype=np.uint8).reshape(3, 2, 2)},
    "prompt": "hi",
    "flag": np.True_,
    "scalar": 1.5,
    "n": 3,
    "list": [1, 2.5, None],
}


def test_openpis_bytes() -> None:
    data = (GOLDENS / "msgpack_example.bin").read_bytes()
    assert packb(OPENPI_EXAMPLE) == data
    found = unpackb(data)
    np.testing.assert_array_equal(found["state"], OPENPI_EXAMPLE["state"])
    np.testing.assert_array_equal(found["images"]["cam_high"], OPENPI_EXAMPLE["images"]["cam_high"])
    assert found["flag"] is np.True_ and found["list"] == [1, 2.5, None] and found["prompt"] == "hi"


DTYPES = (
    nps.boolean_dtypes() | nps.integer_dtypes() | nps.unsigned_integer_dtypes() | nps.floating_dtypes(endianness="=")
)


@given(DTYPES.flatmap(lambda dtype: nps.arrays(dtype, nps.array_shapes(min_dims=0, max_dims=4, min_side=0))))
def test_arrays_survive(array: np.ndarray) -> None:
    found = unpackb(packb({"x": array}))["x"]
    assert found.dtype == array.dtype and found.shape == array.shape
    assert found.tobytes() == array.tobytes() and not found.flags.writeable


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.binary(), lambda values: st.lists(values) | st.dictionaries(st.text(max_size=9), values), max_leaves=12
)


@settings(max_examples=50)
@given(VALUES)
def test_what_msgpack_reads_is_read_alike_or_refused(value: object) -> None:
    """The reader counts elements and depth by itself, so it has to agree with msgpack about where elements end."""
    data = msgpack.packb(value)
    try:
        assert unpackb(data) == msgpack.unpackb(data) == value
    except MessageError as error:
        assert "more than 8 deep" in str(error)


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.sampled_from("<>"))
def test_a_text_survives_in_each_of_numpys_forms(text: str, order: str) -> None:
    """As in openpi, whose clients may send a prompt as np.str_ or as an array of one element."""
    array = np.array(text)
    for sent in (np.str_(text), array, array[None], array.astype(array.dtype.newbyteorder(order))):
        assert unpackb(packb({"prompt": sent})) == {"prompt": text}


def array_message(**changes: object) -> bytes:
    fields = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]} | changes
    return msgpack.packb({key.encode(): value for key, value in fields.items()})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x81\xa1a",
        packb({"a": 1}) + b"x",
        msgpack.packb({1: 2}),
        b"\xa1\xff",
        b"\x91" * 2000,
        array_message(shape=[3]),
        array_message(shape=[-2]),
        array_message(shape=[2**62, 2**62]),
        array_message(shape="2"),
        array_message(shape=[True, 2]),
        array_message(dtype="O", data=bytes(16)),
        array_message(dtype="V8", shape=[1]),
        array_message(dtype="i4,i4", shape=[1]),
        array_message(dtype="(2,)i4", shape=[1]),
        array_message(dtype="<c8", shape=[1]),
        array_message(dtype=None),
        array_message(data="text"),
        array_message(dtype="<f3", data=bytes(6)),
        array_message(dtype="U1000000", data=bytes(4), shape=[1]),
        array_message(dtype="<U99999", data=bytes(4), shape=[]),
        array_message(dtype="<U99999", data=bytes(4 * 99999), shape=[]),
        array_message(dtype="<U1", shape=[2]),  # two texts
        array_message(dtype="<U2", shape=[1] * 33),
        array_message(dtype="<U2", shape=[1], data=b"\xff" * 8),  # no such characters
        array_message(dtype="<U2", shape=[1], data=b"\x00\xd8\x00\x00" * 2),  # half of a character
        array_message(dtype="<U2", shape=[1], data="text"),
        array_message(dtype="|S8", shape=[]),
        array_message(shape=[0, 2**62], data=b""),
        msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}),
        msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}),
    ],
)
def test_bad_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpackb(data)


def test_a_message_of_millions_of_lists_is_refused_before_it_fills_the_memory() -> None:
    """A list takes one byte in a message and 56 in Python, and no client gets an answer while lists are made."""
    size, chunk = 2**20, 2**10
    lists = [b"\xdd" + size.to_bytes(4, "big") + b"\x90" * size]
    lists.append(b"\xdc" + chunk.to_bytes(2, "big") + (b"\xdc" + chunk.to_bytes(2, "big") + b"\x80" * chunk) * chunk)
    for data in lists:
        tracemalloc.start()
        with pytest.raises(MessageError, match=r"more than 1024 keys and values"):
            unpackb(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20


def test_keys_are_not_kept_for_ever() -> None:
    """Python 3.12.1 never frees an interned text, so a client that sends ever new keys would fill the memory."""
    name = uuid.uuid4().hex
    [key] = unpackb(packb({name: 1}))
    assert key == name and sys.intern("".join(list(name))) is not key


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(data: bytes) -> None:
    try:
        unpackb(data)
    except MessageError as error:
        assert str(error)


@pytest.mark.parametrize("value", [np.array([None]), np.array([1j]), np.zeros(1, [("a", "i4")]), object()])
def test_only_plain_numbers_are_sent(value: object) -> None:
    with pytest.raises(TypeError, match="a message cannot hold"):
        packb({"x": value})
