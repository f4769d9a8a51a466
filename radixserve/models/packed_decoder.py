"""PackedDecoder: the Decoder's forward on a CPU, with weights packed once. With the CPU's attention kernel a step is one native call; with
another backend everything between two attentions is one. The bits are the same.

The bits of a row's result do not depend on the rows beside it. The weights' only copy is the packed one: a row of a tied embedding is
gathered from the packed head. Quantized weights are packed as integers with a scale for each output; the embedding stays as it was.
"""

import ctypes
import math
import weakref

import torch

from radixserve.attention.backend import AttentionBackend
from radixserve.attention.batch import ForwardBatch
from radixserve.attention.cpu_backend import CpuBackend
from radixserve.huge_pages import HugePages
from radixserve.models.config import ModelConfig
from radixserve.models.decoder import DecoderWeights, LayerWeights
from radixserve.models.layers import RotaryTable
from radixserve.native import KernelBuildError, check, load_library
from radixserve.native.levels import level_of_this_machine

_DTYPE_BITS = {torch.float32: 1, torch.bfloat16: 2}
_PANEL = 32  # columns of a panel, and two halves of 16 where two matrices are interleaved (native/csrc/packed_linear.h)


def why_not_packed(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str:
    """What keeps a PackedDecoder from being made; empty where nothing does. Builds the native library where all else says yes."""
    if device.type != "cpu":
        return f"expected a CPU, got {device}"
    if dtype not in _DTYPE_BITS:
        return f"expected float32 or bfloat16, got {dtype} on {device}"
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim, config.head_dim)
    if any(width % 2 for width in widths):
        return f"expected even widths of hidden states, MLP and heads, got {', '.join(map(str, widths))}"
    try:
        load_library()
    except KernelBuildError as error:
        return str(error)
    needs = "AVX-512" if dtype == torch.float32 else "AVX-512 and AVX512-BF16"
    return "" if can_compute(dtype) else f"products of {dtype} need {needs}, and the level {level_of_this_machine().name} has none"


def can_compute(dtype: torch.dtype) -> bool:
    """Whether the native library can be had and multiplies `dtype` on this processor. Builds it when asked first."""
    if dtype not in _DTYPE_BITS:
        return False
    try:
        return bool(load_library().radixserve_decoder_dtypes() & _DTYPE_BITS[dtype])
    except KernelBuildError:
        return False


class PackedDecoder:
    """See models.Decoder, whose public names these are. What forward() hands to attention is overwritten after its run() has returned."""

    linear_backend = "native"

    def __init__(self, config: ModelConfig, weights: DecoderWeights, layers: list[LayerWeights], quantization: str = "none") -> None:
        """`weights` without layers; `layers` is emptied as they are packed, so that no layer is held twice for longer than it takes.
        `quantization` is none or int8, of all matrices but the embedding."""
        self.config = config
        self.quantization = quantization
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._library = library = load_library()
        self._rotary = RotaryTable(config, self.dtype, self.device)
        self._heads = torch.empty(0, dtype=self.dtype)
        # an embedding of integers would lose what a lookup need not lose
        is_head_looked_up = weights.lm_head is weights.embedding and quantization == "none"
        self._pages = HugePages()
        # everything that the native decoder points to
        self._kept: list[torch.Tensor] = [weights.final_norm]
        head = self._pack(weights.lm_head)
        embedding = None if is_head_looked_up else self._keep(weights.embedding.contiguous())
        sizes = (ctypes.c_int64 * 6)(
            config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size
        )
        self._native = library.radixserve_decoder_new(
            self.dtype == torch.bfloat16,
            sizes,
            config.rms_norm_eps,
            self._rotary.table.data_ptr(),
            embedding,
            weights.final_norm.data_ptr(),
            (ctypes.c_void_p * 2)(*head),
        )
        if not self._native:
            assert can_compute(self.dtype), f"PackedDecoder: no native decoder for {self.dtype}; ask why_not_packed first"
            raise MemoryError("no memory for the native decoder")
        weakref.finalize(self, library.radixserve_decoder_delete, self._native)
        while layers:
            self._add_layer(layers.pop(0))

    @property
    def size_bytes(self) -> int:
        """Memory of the weights, padding of the last panels included, a tied head counted once unless it is quantized."""
        return sum(tensor.nbytes for tensor in self._kept)

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """[num_tokens, hidden_size] after the final norm. The caller has called attention.plan(batch)."""
        ids, positions = batch.input_ids.contiguous(), batch.positions.contiguous()
        out = torch.empty(batch.num_tokens, self.config.hidden_size, dtype=self.dtype)
        if self.attends_natively(attention):
            assert isinstance(attention, CpuBackend) and attention.has_planned(batch), "PackedDecoder: expected the planned batch"
            self._forward_at_once(ids, positions, batch.out_slots.contiguous(), attention, out)
        else:
            self._forward_by_layer(ids, positions, attention, out)
        return out

    def attends_natively(self, attention: AttentionBackend) -> bool:
        """Whether forward() with this backend is one native call, which also measures the attention's time."""
        config = self.config
        shape = (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
        return isinstance(attention, CpuBackend) and attention.serves(shape, self.dtype)

    def _forward_at_once(
        self, ids: torch.Tensor, positions: torch.Tensor, out_slots: torch.Tensor, attention: CpuBackend, out: torch.Tensor
    ) -> None:
        status = self._library.radixserve_decoder_forward(
            self._native,
            ids.shape[0],
            ids.data_ptr(),
            positions.data_ptr(),
            attention.handle,
            attention.pool_addresses,
            out_slots.data_ptr(),
            out.data_ptr(),
        )
        check(self._library, status, f"the activations of {ids.shape[0]} tokens")

    def _forward_by_layer(self, ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend, out: torch.Tensor) -> None:
        config, library, n = self.config, self._library, ids.shape[0]
        doing = f"the activations of {n} tokens"
        num_heads, num_rotated = config.num_heads, config.num_heads + config.num_kv_heads
        heads = self._heads_of(n)
        q, k, v = heads[:, :num_heads], heads[:, num_heads:num_rotated], heads[:, num_rotated:]
        heads_at, positions_at, out_at = heads.data_ptr(), positions.data_ptr(), out.data_ptr()
        status = library.radixserve_decoder_begin(self._native, n, torch.get_num_threads(), ids.data_ptr(), positions_at, heads_at)
        check(library, status, doing)
        for layer in range(config.num_layers):
            attended = attention.run(layer, q, k, v).contiguous()
            status = library.radixserve_decoder_advance(self._native, layer, n, attended.data_ptr(), positions_at, heads_at, out_at)
            check(library, status, doing)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> [n, vocab_size] float32, never rounded to the model's type."""
        hidden = hidden.contiguous()
        logits = torch.empty(hidden.shape[0], self.config.vocab_size, dtype=torch.float32)
        n, threads = hidden.shape[0], torch.get_num_threads()
        status = self._library.radixserve_decoder_logits(self._native, n, threads, hidden.data_ptr(), logits.data_ptr())
        check(self._library, status, f"the logits of {n} rows")
        return logits

    def seconds(self) -> tuple[float, float, float, float]:
        """Wall seconds so far: attention where attends_natively(), products, norms and rotary, head."""
        seconds = (ctypes.c_double * 4)()
        self._library.radixserve_decoder_seconds(self._native, seconds)
        return seconds[0], seconds[1], seconds[2], seconds[3]

    def _heads_of(self, n: int) -> torch.Tensor:
        """[n, num_heads + 2 num_kv_heads, head_dim] in memory that is used again by the next step."""
        width = (self.config.num_heads + 2 * self.config.num_kv_heads) * self.config.head_dim
        if self._heads.numel() < n * width:
            with torch.inference_mode(False):
                self._heads = torch.empty(n * width, dtype=self.dtype)
        return self._heads[: n * width].view(n, -1, self.config.head_dim)

    def _add_layer(self, layer: LayerWeights) -> None:
        parts = (ctypes.c_void_p * 12)(
            self._keep(layer.input_norm),
            *self._pack(layer.qkv),
            self._keep(layer.qkv_bias),
            self._keep(layer.qk_norm),
            *self._pack(layer.output),
            self._keep(layer.post_attention_norm),
            *self._pack(layer.gate_up, is_interleaved=True),
            *self._pack(layer.down),
        )
        check(self._library, self._library.radixserve_decoder_add_layer(self._native, parts), "a layer of the native decoder")

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _pack(self, weight: torch.Tensor, is_interleaved: bool = False) -> tuple[int, int | None]:
        """weight [out, in] -> addresses of panels and, if quantized, of scales; interleaved: first half of its rows beside the second."""
        assert weight.is_contiguous()
        rows, width = weight.shape
        per_panel = _PANEL // 2 if is_interleaved else _PANEL
        num_panels = -(-(rows // 2 if is_interleaved else rows) // per_panel)
        if self.quantization == "int8":
            integers = self._zeros(num_panels, width, _PANEL, dtype=torch.int8)
            scales = torch.zeros(num_panels, _PANEL)
            is_bfloat16 = weight.dtype == torch.bfloat16
            self._library.radixserve_decoder_quantize(
                weight.data_ptr(), is_bfloat16, rows, width, is_interleaved, integers.data_ptr(), scales.data_ptr()
            )
            self._kept += [integers, scales]
            return integers.data_ptr(), scales.data_ptr()
        words = width * weight.element_size() // 4
        packed = self._zeros(num_panels, words, _PANEL, dtype=torch.int32)
        self._library.radixserve_decoder_pack(weight.data_ptr(), rows, words, is_interleaved, packed.data_ptr())
        self._kept.append(packed)
        return packed.data_ptr(), None

    def _zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(self._pages.take(math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
