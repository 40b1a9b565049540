"""Numbers with their units, short enough for a sentence or a cell."""

from collections.abc import Sequence


def short(value: float, digits: int = 3) -> str:
    """The number with so many digits; a large number keeps all digits before the point and never becomes 1e+04."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def format_seconds(seconds: float) -> str:
    """Seconds with the unit that fits."""
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if seconds < 999.5 * size:
            return f"{short(seconds / size)} {unit}"
    if seconds < 120:
        return f"{short(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def format_duration(seconds: float) -> str:
    """A predicted time, which is not known to the minute: two digits with the unit that fits."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{short(seconds / size, 2)} {unit}"
    return f"{short(seconds, 2)} s"


def format_bytes(num_bytes: float) -> str:
    """Bytes with the unit that fits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{short(num_bytes / size)} {unit}"
    return f"{num_bytes:.0f} B"


def format_percent(rate: float, digits: int = 0) -> str:
    return f"{100 * rate:.{digits}f} %"


def format_interval(ends: Sequence[float], digits: int = 0) -> str:
    """The two ends of a range of rates."""
    low, high = ends
    return f"{100 * low:.{digits}f} to {format_percent(high, digits)}"
