"""FlashInfer's interface as its documentation defines it, in plain torch, one row and one page at a time: slow, and right on any device.

Takes the place of the module in `FlashInferBackend`, so that what we hand to FlashInfer (page tables, windows, scales, layouts) is run on a
CPU. It refuses what the real kernels refuse. Written from FlashInfer's documentation of its arguments, not from the reference backend.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.sampling.filters import keep_sorted
from fairlead_worker.sampling.masks import unpack

HEAD_DIMS = (64, 128, 256)
FLOAT8 = torch.float8_e4m3fn
KV = tuple[torch.Tensor, torch.Tensor]


class _Plan:
    """What a wrapper keeps from `plan` to `run`."""

    def __init__(
        self,
        query_indptr: list[int],
        page_indptr: torch.Tensor,
        page_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        shape: tuple[int, int, int, int],
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for name, part in (("indptr", page_indptr), ("indices", page_indices), ("last_page_len", last_page_len)):
            assert part.dtype == torch.int32 and part.device.type == "cpu" and part.is_contiguous(), f"{name}: int32 on the CPU"
        self.heads, self.kv_heads, self.dim, self.page_size = shape
        assert self.heads % self.kv_heads == 0 and self.dim in HEAD_DIMS
        assert q_data_type in (torch.float16, torch.bfloat16) and kv_data_type in (q_data_type, FLOAT8)
        self.query_indptr, self.page_indptr = query_indptr, page_indptr.tolist()
        self.page_indices, self.last_page_len = page_indices.tolist(), last_page_len.tolist()
        assert len(self.page_indptr) == len(query_indptr) == len(self.last_page_len) + 1
        assert len(self.page_indices) == self.page_indptr[-1]
        assert all(1 <= length <= self.page_size for length in self.last_page_len)
        self.scale, self.window_left, self.softcap, self.dtype = sm_scale, window_left, logits_soft_cap, q_data_type
        self.kv_dtype = kv_data_type

    def run(self, q: torch.Tensor, kv: KV, out: torch.Tensor, k_scale: float | None = None, v_scale: float | None = None) -> torch.Tensor:
        """q [T, heads, dim] -> `out`, in float64 inside."""
        assert q.shape == (self.query_indptr[-1], self.heads, self.dim), (q.shape, self.query_indptr[-1])
        assert q.dtype == out.dtype == self.dtype and kv[0].dtype == kv[1].dtype == self.kv_dtype and q.stride(-1) == 1
        assert kv[0].shape == kv[1].shape and kv[0].shape[1:] == (self.page_size, self.kv_heads, self.dim)
        assert out.shape == q.shape and out.is_contiguous()
        scale = self.scale * (1.0 if k_scale is None else k_scale)
        for row, last in enumerate(self.last_page_len):
            begin, end = self.query_indptr[row], self.query_indptr[row + 1]
            if begin == end:
                continue
            pages = self.page_indices[self.page_indptr[row] : self.page_indptr[row + 1]]
            key, value = (torch.cat([part[page] for page in pages])[: (len(pages) - 1) * self.page_size + last].double() for part in kv)
            for query in range(begin, end):
                seen = len(key) - (end - begin) + (query - begin) + 1  # causal, the last query seeing every key
                first = 0 if self.window_left < 0 else max(0, seen - 1 - self.window_left)
                # [heads, dim]: each group of query heads against its own KV head
                queries = q[query].double().view(self.kv_heads, -1, self.dim)
                scores = torch.einsum("ghd,lgd->ghl", queries, key[first:seen]) * scale
                if self.softcap > 0:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                mixed = torch.einsum("ghl,lgd->ghd", scores.softmax(-1), value[first:seen])
                out[query] = mixed.reshape(self.heads, self.dim).to(out.dtype)
        if v_scale is not None:
            out *= v_scale
        return out


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and backend in ("auto", "fa2", "fa3") and float_workspace_buffer.dtype == torch.uint8
        self._plan: _Plan | None = None
        given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._buffers = [part for part in given if part is not None]
        self._most = 0
        assert len(self._buffers) == (4 if use_cuda_graph else 0)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert causal and qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu"
        shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        paged = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        elements = (q_data_type, kv_data_type or q_data_type)
        if self._buffers:
            self._most = self._most or int(qo_indptr[-1])
            assert len(qo_indptr) == len(self._buffers[0]) and int(qo_indptr[-1]) <= self._most, "a graph has one number of rows"
            for buffer, part in zip(self._buffers, (qo_indptr, *paged), strict=True):
                buffer[: len(part)].copy_(part)
        self._plan = _Plan(qo_indptr.tolist(), *paged, shape, scale, window_left, logits_soft_cap or 0.0, *elements)

    def run(
        self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor, k_scale: float | None = None, v_scale: float | None = None
    ) -> torch.Tensor:
        assert self._plan is not None
        return self._plan.run(q, paged_kv_cache, out, k_scale, v_scale)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD" and backend in ("auto", "fa2") and not float_workspace_buffer.any(), "zeros at its first use"
        self._buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None and paged_kv_indices_buffer is not None and paged_kv_last_page_len_buffer is not None
            self._buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self._plan: _Plan | None = None
        self._tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert self._tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8), "the other kernels' group sizes"
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        kind = (scale, window_left, logits_soft_cap or 0.0, q_data_type, kv_data_type or q_data_type)
        shape = (num_qo_heads, num_kv_heads, head_dim, page_size)
        if self._buffers is not None:
            assert len(last_page_len) == len(self._buffers[2]), "a graph has one batch size"
            for buffer, part in zip(self._buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(part)].copy_(part)
        self._plan = _Plan(list(range(len(indptr))), indptr, indices, last_page_len, shape, *kind)

    def run(
        self, q: torch.Tensor, paged_kv_cache: KV, *, out: torch.Tensor, k_scale: float | None = None, v_scale: float | None = None
    ) -> torch.Tensor:
        assert self._plan is not None
        return self._plan.run(q, paged_kv_cache, out, k_scale, v_scale)


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: KV,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Token by token, by the page tables alone."""
    keys, values = paged_kv_cache
    assert kv_layout == "NHD" and append_key.shape == append_value.shape and keys.stride() == values.stride()
    assert append_key.dtype == append_value.dtype == keys.dtype and append_key.stride(-1) == append_value.stride(-1) == 1
    assert all(part.dtype == torch.int32 for part in (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len))
    page_size = keys.shape[1]
    for token, (row, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        begin, end = int(kv_indptr[row]), int(kv_indptr[row + 1])
        assert position < (end - begin - 1) * page_size + int(kv_last_page_len[row]), "room for it has been made"
        page, slot = int(kv_indices[begin + position // page_size]), position % page_size
        keys[page, slot], values[page, slot] = append_key[token], append_value[token]


class MLAPlanMetadata:
    """The page tables of a plan over latents."""

    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        self.parts = parts

    @classmethod
    def csr(cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor) -> "MLAPlanMetadata":
        return cls((qo_indptr, kv_indptr, kv_indices, kv_len_arr))


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend in ("fa2", "fa3") and float_workspace_buffer.dtype == torch.uint8
        self._buffers = [part for part in (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if part is not None]
        assert len(self._buffers) == (4 if use_cuda_graph else 0)
        self._rows: list[tuple[int, int, list[int], int]] | None = None

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal and q_data_type in (torch.float16, torch.bfloat16) and kv_data_type == q_data_type
        assert all(part.dtype == torch.int32 for part in metadata.parts)
        for place, (buffer, part) in enumerate(zip(self._buffers, metadata.parts, strict=False)):
            assert len(part) <= len(buffer) if place == 2 else part.shape == buffer.shape, "a graph has one number of rows"
            buffer[: len(part)].copy_(part)
        queries, pages, indices, lengths = (part.tolist() for part in metadata.parts)
        assert len(queries) == len(pages) == len(lengths) + 1 and len(indices) == pages[-1]
        tables = [indices[begin:end] for begin, end in pairwise(pages)]
        assert all(len(table) == -(-length // page_size) for table, length in zip(tables, lengths, strict=True))
        self._rows = [(*span, table, length) for span, table, length in zip(pairwise(queries), tables, lengths, strict=True)]
        tile = 128 if queries[-1] * num_heads // len(lengths) > 64 else 64
        assert tile % num_heads == 0 or all(end - begin <= 1 for begin, end, _, _ in self._rows), "a tile ends between heads"
        self._heads, self._page_size, self._scale, self._dtype = num_heads, page_size, sm_scale, q_data_type
        self._sizes = (head_dim_ckv, head_dim_kpe)

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """query [T, heads, ckv + kpe] -> `out` [T, heads, ckv], in float64 inside."""
        assert self._rows is not None and query.dtype == out.dtype == kv_cache.dtype == self._dtype and query.is_contiguous()
        latent, width = self._sizes[0], sum(self._sizes)
        assert query.shape == (self._rows[-1][1], self._heads, width) and out.shape == (*query.shape[:2], latent)
        assert kv_cache.shape[1:] == (self._page_size, width) and kv_cache.stride(-1) == 1
        for begin, end, table, length in self._rows:
            if begin == end:
                continue
            keys = torch.cat([kv_cache[page] for page in table])[:length].double()
            for token in range(begin, end):
                seen = keys[: length - (end - begin) + (token - begin) + 1]
                weights = (query[token].double() @ seen.T * self._scale).softmax(-1)
                out[token] = (weights @ seen[:, :latent]).to(out.dtype)
        return out


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """As `append_paged_kv_cache`, for one head whose key and value have sizes of their own."""
    assert append_ckv.shape[1:] == ckv_cache.shape[2:] == (512,) and append_kpe.shape[1:] == kpe_cache.shape[2:] == (64,)
    for part, cache in ((append_ckv, ckv_cache), (append_kpe, kpe_cache)):
        heads, pages = part[:, None], cache[:, :, None]
        append_paged_kv_cache(heads, heads, batch_indices, positions, (pages, pages), kv_indices, kv_indptr, kv_last_page_len)


def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: torch.Tensor,
    k_rope: torch.Tensor,
    q_nope: torch.Tensor | None,
    k_nope: torch.Tensor | None,
    v: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    pos_ids: torch.Tensor,
    paged_kv_cache: KV,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    *,
    quantize_dtype: torch.dtype = FLOAT8,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
) -> None:
    """Keys turned whole, values as they are, both scaled, saturated and stored; there are no queries here."""
    keys, values = paged_kv_cache
    tokens, kv_heads, dim = k_rope.shape
    _sixteen(k_rope, v)
    assert q_rope.shape == (tokens, 0, dim) and q_rope.dtype == k_rope.dtype and q_nope is None and k_nope is None
    assert quantize_dtype == FLOAT8 == keys.dtype == values.dtype and keys.shape[1:] == (page_size, kv_heads, dim) and kv_layout == "NHD"
    assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.shape[1] == dim and pos_ids.shape == (tokens,) and pos_ids.is_contiguous()
    cosines, sines = cos_sin_cache[pos_ids.long()][:, None].chunk(2, -1)
    left, right = k_rope.float().chunk(2, -1)
    turned = torch.cat((left * cosines - right * sines, right * cosines + left * sines), -1)
    stored, other = ((part.float() * quant_scale_kv).clamp(-448, 448).to(FLOAT8) for part in (turned, v))  # 448: the largest of e4m3
    last = torch.full((len(kv_indptr) - 1,), page_size, dtype=torch.int32)
    append_paged_kv_cache(stored, other, batch_indices, positions, paged_kv_cache, kv_indices, kv_indptr, last)


def _sixteen(*parts: torch.Tensor) -> None:
    assert all(part.dtype in (torch.float16, torch.bfloat16) and part.stride(-1) == 1 for part in parts)
    assert len({part.dtype for part in parts}) == 1


def _normed(summed: torch.Tensor, weight: torch.Tensor, eps: float, plus: float) -> torch.Tensor:
    exact = summed.float()
    return exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * (weight.float() + plus)


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    _sixteen(input, weight)
    assert input.dim() in (2, 3) and weight.shape == input.shape[-1:]
    return _normed(input, weight, eps, 0.0).to(input.dtype)


def gemma_rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    _sixteen(input, weight)
    assert input.dim() == 2 and weight.shape == input.shape[-1:]
    return _normed(input, weight, eps, 1.0).to(input.dtype)


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    _add(input, residual, weight, eps, 0.0)


def gemma_fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    _add(input, residual, weight, eps, 1.0)


def _add(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus: float) -> None:
    _sixteen(input, residual, weight)
    assert input.dim() == 2 and input.shape == residual.shape and input.data_ptr() != residual.data_ptr()
    summed = input.float() + residual.float()  # the norm sees the sum before it is rounded
    residual.copy_(summed)
    input.copy_(_normed(summed, weight, eps, plus))


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    return _gated(input, torch.nn.functional.silu)


def gelu_and_mul(input: torch.Tensor) -> torch.Tensor:
    return _gated(input, torch.nn.functional.gelu)


def gelu_tanh_and_mul(input: torch.Tensor) -> torch.Tensor:
    return _gated(input, lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"))


def _gated(input: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    _sixteen(input)
    assert input.is_contiguous()
    gate, up = input.float().chunk(2, -1)
    return (activation(gate) * up).to(input.dtype)


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor
) -> None:
    _sixteen(query, key)
    assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous() and positions.shape == query.shape[:1]
    assert cos_sin_cache.dtype == torch.float32 and head_size in HEAD_DIMS and int(positions.max()) < len(cos_sin_cache)
    cosines, sines = cos_sin_cache[positions][:, None].chunk(2, -1)
    half = cosines.shape[-1]
    for part in (query, key):
        heads = part.view(len(part), -1, head_size)
        left, right = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., :half] = left * cosines - right * sines
        heads[..., half : 2 * half] = right * cosines + left * sines


def choose_tokens(
    logits: torch.Tensor, parameters: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor, words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Not FlashInfer's: `sampling.fused.Launch`, row by row with a sort."""
    assert parameters.shape == (len(logits), 14) and parameters.dtype == torch.float64 and ids.dtype == words.dtype == torch.int32
    assert ids.shape == numbers.shape and numbers.dtype == torch.float32
    tokens, dead = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(words), dtype=torch.bool)
    for row, settings in enumerate(parameters.tolist()):
        temperature, top_k, top_p, least, repetition, frequency, presence, noise = settings[:8]
        edits = [(ids[begin:end].long(), numbers[begin:end]) for begin, end in pairwise(map(int, settings[8:13]))]
        left = logits[row].to(torch.float32, copy=True)
        left[edits[0][0]] += edits[0][1]
        history, counts = edits[1]
        seen = left[history]
        left[history] = torch.where(seen > 0, seen / repetition, seen * repetition) - frequency * counts - presence * (counts > 0)
        left[edits[2][0]] = -torch.inf
        if (mask := int(settings[13])) >= 0:
            left[~unpack(words[mask : mask + 1].numpy().view(np.uint32), len(left), left.device)[0]] = -torch.inf
            dead[mask] = left.amax() == -torch.inf
        worded = left.index_fill(0, edits[3][0], -torch.inf)
        left = left if worded.amax() == -torch.inf else worded
        if temperature == 0:
            tokens[row] = left.argmax()
            continue
        scaled = (left - left.amax())[None] / temperature
        sampling = Sampling(max_tokens=1, top_k=int(top_k), top_p=top_p, min_p=math.exp(least))
        cumulative = keep_sorted(scaled, [sampling])[0].softmax(0, dtype=torch.float64).cumsum(0)
        tokens[row] = torch.searchsorted(cumulative, noise * cumulative[-1], right=True).clamp_(max=len(left) - 1)
    return tokens, dead
