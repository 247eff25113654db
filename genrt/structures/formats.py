"""The formats of strings in JSON schemas where llguidance's own admit too much, as regular expressions.

Each is a subset of the format that Python's standard library can read: llguidance's dates have a 29
February in every year, and its times a 60th second in every minute.
"""

from __future__ import annotations

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"  # datetime knows no year 0
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_HOUR = "(?:[01][0-9]|2[0-3])"
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:Z|[+-]{_HOUR}:[0-5][0-9])"

FORMATS = {"date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}"}
"""The formats by name. None has ``^`` or ``$``."""

LONGEST = {"hostname": 253}
"""The most characters that a format allows, where llguidance's is not bounded."""
