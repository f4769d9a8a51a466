"""JSON arrays that are encoded piece by piece, so that what several bodies show is encoded once."""

from collections.abc import Iterable
from typing import Any

import orjson


class EncodedArray:
    """Grows at its end; whole() is a copy of bytes, whatever the items cost to encode."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._inner = bytearray()
        self.extend(items)

    def extend(self, items: Iterable[Any]) -> None:
        encoded = orjson.dumps(list(items))[1:-1]
        if encoded:
            self._inner += b"," + encoded if self._inner else encoded

    def whole(self, rest: "EncodedArray | None" = None) -> orjson.Fragment:
        """All items so far, and those of `rest` after them."""
        parts = [array._inner for array in (self, rest) if array is not None and array._inner]
        return orjson.Fragment(b"[%b]" % b",".join(parts))
