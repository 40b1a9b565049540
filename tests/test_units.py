"""Numbers with their units."""

import pytest

from acrlpd.units import format_bytes, format_seconds, short


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(0.0), "0 µs"),
        (format_seconds(0.00099996), "1 ms"),
        (format_seconds(0.9996), "1 s"),
        (format_seconds(0.9994), "999 ms"),
        (format_seconds(119.97), "120 s"),
        (format_seconds(3599.6), "1 h 00 min"),
        (format_bytes(1010 * 2**20), "1,010 MiB"),
        (format_bytes(2.345 * 2**30), "2.35 GiB"),
        (format_bytes(2e15), "1,862,645 GiB"),
        (short(25_600.4, 4), "25,600"),
        (short(-9999.6, 4), "-10,000"),
        (short(123.44, 4), "123.4"),
    ],
)
def test_numbers_are_short_but_never_powers_of_ten(text: str, expected: str) -> None:
    assert text == expected
