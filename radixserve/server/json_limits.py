"""How much a large JSON body may hold, counted before it is parsed: the parser lets no other thread run until it is through.

The counts walk the body in slices, so that the threads of other streams get their turns.
"""

from collections.abc import Iterator

from radixserve.errors import InvalidRequestError

COUNTED_FROM_BYTES = 2**20  # what is smaller is parsed in some ten milliseconds, whatever it holds
MAX_CONTAINERS = 250_000  # lists, objects and names: about 100 ns each
MAX_COMMAS = 2_000_000  # items of lists and objects: about 20 ns each
_SLICE_BYTES = 64 * 1024
_OPENERS = (b"[", b"{", b":")


def check_num_values(body: bytes) -> None:
    """Raises InvalidRequestError for a body of more values than is worth parsing. What is inside strings does not count."""
    if len(body) < COUNTED_FROM_BYTES:
        return
    if _is_within(*_count(body[start : start + _SLICE_BYTES] for start in range(0, len(body), _SLICE_BYTES))):
        return
    num_containers, num_commas = _count(_outside_strings(body))
    if num_containers > MAX_CONTAINERS:
        raise InvalidRequestError(f"the body: expected at most {MAX_CONTAINERS} lists, objects and names of fields, got {num_containers}")
    if num_commas > MAX_COMMAS:
        raise InvalidRequestError(f"the body: expected at most {MAX_COMMAS} commas between values, got {num_commas}")


def _is_within(num_containers: int, num_commas: int) -> bool:
    return num_containers <= MAX_CONTAINERS and num_commas <= MAX_COMMAS


def _count(pieces: Iterator[bytes]) -> tuple[int, int]:
    """(lists, objects and names; commas)"""
    num_containers = num_commas = 0
    for piece in pieces:
        num_containers += sum(map(piece.count, _OPENERS))
        num_commas += piece.count(b",")
    return num_containers, num_commas


def _outside_strings(body: bytes) -> Iterator[bytes]:
    is_inside, start = False, 0
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the next byte belongs to the last backslash
            piece = body[start : start + _SLICE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield b"".join(parts[int(is_inside) :: 2])
        is_inside ^= len(parts) % 2 == 0
