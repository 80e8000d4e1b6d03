"""Server-sent events from the parts of a body that carry arrival stamps.

Lines end in LF, CRLF or CR and nothing else: U+2028 and its kind are content, so ``str.splitlines``
must not be used. https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def events(parts: Sequence[bytes], stamps: Sequence[int]) -> Iterator[tuple[bytes, int]]:
    """The data of each event and the stamp (ns) of the part that completed it, in order.

    What stands at the end without its empty line counts as an event too: servers close right after the last
    line, and a finish reason must not be lost over that.
    """
    values: list[bytes] = []
    """Data lines of the event so far, …"""
    cut: list[bytes] = []
    """… and the parts of the line that goes on."""
    after_cr, first, at_ns = False, True, 0
    for data, stamp in zip(parts, stamps, strict=True):
        if (
            not (values or cut or after_cr)
            and data.find(b"\n") == len(data) - 2
            and data.startswith(b"data: ")
            and data.endswith(b"\n")
            and b"\r" not in data
        ):
            yield data[6:-2], stamp  # the usual part of a stream: one event of one line
            first = False
            continue
        if after_cr and data.startswith(b"\n"):
            data = data[1:]
        after_cr = data.endswith(b"\r")
        if not data:
            continue
        at_ns = stamp
        if b"\r" in data:  # alone it ends a line as well
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            cut.append(data)
            continue
        *lines, rest = b"".join([*cut, data]).split(b"\n")
        cut = [rest] if rest else []
        for line in lines:
            if first:
                line, first = line.removeprefix(_BYTE_ORDER_MARK), False
            if line:
                values += _value(line)
            elif values:
                yield b"\n".join(values), at_ns
                values.clear()
    values += _value(b"".join(cut))
    if values:
        yield b"\n".join(values), at_ns


def _value(line: bytes) -> list[bytes]:
    """What a line says, if it is one of data."""
    name, _, value = line.partition(b":")
    return [value.removeprefix(b" ")] if name == b"data" else []
