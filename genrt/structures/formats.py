"""The formats of strings in JSON schemas, as regular expressions of genrt's dialect.

Each is a subset of the format that Python's standard library reads: without leap seconds, the year
0, lower case letters between date and time, comments in addresses.
"""

from __future__ import annotations

__all__ = ["FORMATS", "LONGEST"]

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
_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9](?:\\.[0-9]+)?(?:Z|[+\\-]{_HOUR}:[0-5][0-9])"

_OF_DAY = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_OF_YEAR = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:{_OF_YEAR}(?:T{_OF_DAY})?|T{_OF_DAY}|[0-9]+W)"

_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = f"{_LABEL}(?:\\.{_LABEL})*"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_PART = "[0-9A-Fa-f]{1,4}"
_TWO = f"(?:{_PART}:{_PART}|{_IPV4})"
_IPV6 = (
    "(?:"
    + "|".join(
        [
            f"(?:{_PART}:){{6}}{_TWO}",
            f"::(?:{_PART}:){{5}}{_TWO}",
            *(
                f"(?:(?:{_PART}:){{0,{before}}}{_PART})?::(?:{_PART}:){{{4 - before}}}{_TWO}"
                for before in range(5)
            ),
            f"(?:(?:{_PART}:){{0,5}}{_PART})?::{_PART}",
            f"(?:(?:{_PART}:){{0,6}}{_PART})?::",
        ]
    )
    + ")"
)
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_EMAIL = f"{_ATOM}(?:\\.{_ATOM})*@(?:{_HOSTNAME}|\\[(?:{_IPV4}|IPv6:{_IPV6})\\])"

_HEX = "%[0-9A-Fa-f]{2}"
_PLAIN = "A-Za-z0-9\\-._\\~!$&'()*+,;="
_SIGN = f"(?:[{_PLAIN}:@]|{_HEX})"
_AUTHORITY = (
    f"(?:(?:[{_PLAIN}:]|{_HEX})*@)?(?:\\[(?:{_IPV6}|[vV][0-9A-Fa-f]+\\.[{_PLAIN}:]+)\\]"
    f"|(?:[{_PLAIN}]|{_HEX})*)(?::[0-9]*)?"
)
_URI = (
    f"[A-Za-z][A-Za-z0-9+\\-.]*:(?://{_AUTHORITY}(?:/{_SIGN}*)*|/(?:{_SIGN}+(?:/{_SIGN}*)*)?"
    f"|{_SIGN}+(?:/{_SIGN}*)*|)(?:\\?(?:{_SIGN}|[/?])*)?(?:#(?:{_SIGN}|[/?])*)?"
)
_DIGIT = "[0-9A-Fa-f]"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": f"{_DIGIT}{{8}}-(?:{_DIGIT}{{4}}-){{3}}{_DIGIT}{{12}}",
    "uri": _URI,
}
"""The formats by name. None has ``^`` or ``$`` as an anchor."""

LONGEST = {"hostname": 253}
"""The most characters of a format whose expression does not bound them."""
