"""KVPool: the tensors that hold K and V of all pages. It knows neither tokens nor requests nor who owns a page.

They may be stored narrower than they are computed: as numbers of 8 bits, each the nearest to the one given, without a scale.
"""

import math

import torch

from radixserve.huge_pages import HugePages

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


class KVPool:
    """K and V of every page and layer, NHD: [num_pages + 1, page_size, num_kv_heads, head_dim]. Page 0 is padding and belongs to nobody."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of K and V as they are given; stored_dtype: as they lie here, FP8 or (None) the same."""
        assert stored_dtype in (None, dtype, FP8), f"KVPool: expected {dtype} or {FP8} to store, got {stored_dtype}"
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            assert size >= 1, f"KVPool: expected {name} >= 1, got {size}"
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.stored_dtype = stored_dtype or dtype
        self.device = torch.device(device)
        shape = (num_pages + 1, page_size, num_kv_heads, head_dim)
        self._pages = HugePages()
        self._k = [self._zeros(shape) for _ in range(num_layers)]
        self._v = [self._zeros(shape) for _ in range(num_layers)]

    def k(self, layer: int) -> torch.Tensor:
        """[num_pages + 1, page_size, num_kv_heads, head_dim], the storage itself."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """[num_pages + 1, page_size, num_kv_heads, head_dim], the storage itself."""
        return self._v[layer]

    def write(self, layer: int, out_slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k[t] and v[t] at token place out_slots[t] == page_id * page_size + offset.

        out_slots [num_tokens] int64; k, v [num_tokens, num_kv_heads, head_dim] in the pool's dtype. What is too large for FP8 is stored as
        its largest number; infinity, which it has not, as NaN.
        """
        shape = (out_slots.shape[0], self.num_kv_heads, self.head_dim)
        assert k.shape == v.shape == shape, f"KVPool.write: expected k and v of shape {shape}, got {k.shape} and {v.shape}"
        assert k.dtype == v.dtype == self.dtype, f"KVPool.write: expected k and v in {self.dtype}, got {k.dtype} and {v.dtype}"
        for pages, new in ((self._k[layer], k), (self._v[layer], v)):
            if self.stored_dtype != self.dtype:
                # a cast alone would make NaN of what is too large, and clamp() numbers of infinities, which would hide a broken model
                new = new.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
                pages, new = pages.view(torch.uint8), new.view(torch.uint8)  # copies of bytes are known to every device
            pages.flatten(0, 1).index_copy_(0, out_slots, new)

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.stored_dtype, device=self.device)
        # mapped by the first write, so a large pool costs nothing at start
        num_bytes = math.prod(shape) * self.stored_dtype.itemsize
        return torch.frombuffer(self._pages.take(num_bytes), dtype=self.stored_dtype).view(shape)

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, self.stored_dtype)

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, the padding page included."""
        return (self.num_pages + 1) * self.page_size * self.bytes_per_token
