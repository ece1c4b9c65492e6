"""Triton kernels: attention over paged K and V, and the products of LoRA adapters row by row.

Attention is FlashAttention's online softmax (Dao et al. 2022) over block tables (PagedAttention, Kwon et al. 2023).
Where there are few queries, K and V are split over programs and merged afterwards (Flash-Decoding, Dao et al. 2023).
The query heads that share K and V are rows of one product.

Adapters by row are Punica's (Chen et al. 2023), with a table of pointers in place of stacked weights. So ranks need no
padding, and loading an adapter copies nothing. Where many consecutive rows have the same adapter, as in a prefill, they
are multiplied by tiles (SGMV, in the same paper).

Nothing beyond a sequence's length is read, so old content of a block has no effect, not even as NaN. All arithmetic is
in float32. Sums over K and V are taken in the order of the tiles.
"""

import triton
import triton.language as tl


@triton.jit
def _keys_of(first, length, kv_len, window, split, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr):
    """Where the keys that one split of these queries reads begin and end. `window` 0: no window."""
    end = tl.minimum(kv_len, kv_len - length + first + QUERIES)
    begin = tl.where(window > 0, tl.maximum(0, kv_len - length + first - window + 1), 0) // BLOCK_N * BLOCK_N
    tiles = (end - begin + BLOCK_N - 1) // BLOCK_N
    per_split = (tiles + SPLITS - 1) // SPLITS
    low = begin + split * per_split * BLOCK_N
    return low, tl.minimum(end, low + per_split * BLOCK_N)


@triton.jit
def _scores(q, k, scale, softcap, sees, HAS_SOFTCAP: tl.constexpr):
    scores = tl.dot(q, k, input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # a tanh
    return tl.where(sees, scores, float("-inf"))


@triton.jit
def _with_sink(acc, total, largest, sink):
    new_largest = tl.maximum(largest, sink)
    decay = tl.exp(largest - new_largest)
    return acc * decay[:, None], total * decay + tl.exp(sink - new_largest)


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    query_sequence_ptr,
    query_first_ptr,
    row_starts_ptr,
    kv_lens_ptr,
    tables_ptr,
    sinks_ptr,
    scale,
    softcap,
    window,
    num_rows,
    q_row_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: up to QUERIES consecutive tokens of a sequence, all query heads of one KV head, one split of its
    keys.

    Writes out [T, HEADS, V_DIM]. With splits it writes acc [SPLITS, T, HEADS, V_DIM], max and sum [SPLITS, T, HEADS].
    """
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(query_sequence_ptr + program)
    first = tl.load(query_first_ptr + program)
    row_start = tl.load(row_starts_ptr + sequence)
    length = tl.load(row_starts_ptr + sequence + 1) - row_start
    kv_len = tl.load(kv_lens_ptr + sequence)

    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_row = (m < QUERIES * GROUP) & (token < length)
    row = (row_start + token).to(tl.int64)
    position = kv_len - length + token
    k_dim = tl.arange(0, K_PAD)
    v_dim = tl.arange(0, V_PAD)
    q = tl.load(
        q_ptr + row[:, None] * q_row_stride + head[:, None] * q_head_stride + k_dim[None, :],
        mask=is_row[:, None] & (k_dim[None, :] < K_DIM),
        other=0.0,
    )

    low, high = _keys_of(first, length, kv_len, window, split, QUERIES, BLOCK_N, SPLITS)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < high
        block = tl.load(tables_ptr + sequence.to(tl.int64) * table_stride + n // BLOCK_SIZE, mask=exists, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        k = tl.load(
            k_ptr + slot[None, :] * k_token_stride + kv_head * k_head_stride + k_dim[:, None],
            mask=exists[None, :] & (k_dim[:, None] < K_DIM),
            other=0.0,
        )
        sees = exists[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            sees = sees & (n[None, :] > position[:, None] - window)
        scores = _scores(q, k, scale, softcap, sees, HAS_SOFTCAP)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - shift[:, None])
        decay = tl.exp(largest - shift)
        v = tl.load(
            v_ptr + slot[:, None] * v_token_stride + kv_head * v_head_stride + v_dim[None, :],
            mask=exists[:, None] & (v_dim[None, :] < V_DIM),
            other=0.0,
        )
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest

    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            acc, total = _with_sink(acc, total, largest, sink)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + (row * HEADS + head)[:, None] * V_DIM + v_dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=is_row[:, None] & (v_dim[None, :] < V_DIM),
        )
    else:
        place = (split.to(tl.int64) * num_rows + row) * HEADS + head
        tl.store(
            acc_ptr + place[:, None] * V_DIM + v_dim[None, :],
            acc,
            mask=is_row[:, None] & (v_dim[None, :] < V_DIM),
        )
        tl.store(max_ptr + place, largest, mask=is_row)
        tl.store(sum_ptr + place, total, mask=is_row)


@triton.jit
def merge_kernel(
    out_ptr,
    acc_ptr,
    max_ptr,
    sum_ptr,
    sinks_ptr,
    num_rows,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: one head of one row, its splits put together."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.arange(0, SPLITS)
    v_dim = tl.arange(0, V_PAD)
    place = (split.to(tl.int64) * num_rows + row) * HEADS + head
    maxima = tl.load(max_ptr + place)
    sums = tl.load(sum_ptr + place)
    largest = tl.max(maxima, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        largest = tl.maximum(largest, sink)
    shares = tl.exp(maxima - largest)
    total = tl.sum(sums * shares, 0)
    if HAS_SINKS:
        total += tl.exp(sink - largest)
    acc = tl.load(acc_ptr + place[:, None] * V_DIM + v_dim[None, :], mask=v_dim[None, :] < V_DIM, other=0.0)
    merged = tl.sum(acc * shares[:, None], 0) / total
    tl.store(
        out_ptr + (row * HEADS + head) * V_DIM + v_dim,
        merged.to(out_ptr.dtype.element_ty),
        mask=v_dim < V_DIM,
    )


@triton.jit
def _aligned(address, element):
    """Tells the compiler that the address allows loads of 16 bytes."""
    return tl.multiple_of(address.to(tl.pointer_type(element)), 16)


@triton.jit
def shrink_kernel(
    x_ptr,
    slots_ptr,
    pointers_ptr,
    ranks_ptr,
    scales_ptr,
    narrow_ptr,
    x_row_stride,
    narrow_stride,
    IN: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """narrow [T, most ranks] float32 = scale * A x, for each row the A [rank, IN] of its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot)
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        if tl.program_id(1) * BLOCK_R < rank:
            a_ptr = _aligned(tl.load(pointers_ptr + slot), x_ptr.dtype.element_ty)
            acc = tl.zeros([BLOCK_R], tl.float32)
            for start in range(0, IN, BLOCK_K):
                i = start + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptr + row * x_row_stride + i, mask=i < IN, other=0.0).to(tl.float32)
                a = tl.load(
                    a_ptr + r[:, None] * IN + i[None, :], mask=(r[:, None] < rank) & (i[None, :] < IN), other=0.0
                )
                acc += tl.sum(a.to(tl.float32) * x[None, :], 1)
            tl.store(narrow_ptr + row * narrow_stride + r, acc * tl.load(scales_ptr + slot), mask=r < rank)


@triton.jit
def expand_kernel(
    y_ptr,
    slots_ptr,
    pointers_ptr,
    ranks_ptr,
    narrow_ptr,
    y_row_stride,
    narrow_stride,
    num_slots,
    OUT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y [T, OUT] += B narrow, for each row the B of its slot, which is stored transposed: [rank, OUT]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot)
        if rank > 0:
            o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
            b_ptr = _aligned(tl.load(pointers_ptr + num_slots + slot), y_ptr.dtype.element_ty)
            acc = tl.zeros([BLOCK_O], tl.float32)
            for start in range(0, rank, BLOCK_R):
                r = start + tl.arange(0, BLOCK_R)
                narrow = tl.load(narrow_ptr + row * narrow_stride + r, mask=r < rank, other=0.0)
                b = tl.load(
                    b_ptr + r[:, None] * OUT + o[None, :], mask=(r[:, None] < rank) & (o[None, :] < OUT), other=0.0
                )
                acc += tl.sum(b.to(tl.float32) * narrow[:, None], 0)
            y = tl.load(y_ptr + row * y_row_stride + o, mask=o < OUT, other=0.0).to(tl.float32)
            tl.store(y_ptr + row * y_row_stride + o, (y + acc).to(y_ptr.dtype.element_ty), mask=o < OUT)


@triton.jit
def shrink_tiles_kernel(
    x_ptr,
    tiles_ptr,
    slots_ptr,
    pointers_ptr,
    ranks_ptr,
    scales_ptr,
    narrow_ptr,
    x_row_stride,
    narrow_stride,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `shrink_kernel`, for tiles [n, 2] of up to ROWS consecutive rows of one slot: the first, and how many."""
    first = tl.load(tiles_ptr + 2 * tl.program_id(0))
    count = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    slot = tl.load(slots_ptr + first)
    rank = tl.load(ranks_ptr + slot)
    if tl.program_id(1) * BLOCK_R < rank:
        m = tl.arange(0, ROWS)
        row = (first + m).to(tl.int64)
        r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        a_ptr = _aligned(tl.load(pointers_ptr + slot), x_ptr.dtype.element_ty)
        acc = tl.zeros([ROWS, BLOCK_R], tl.float32)
        for start in range(0, IN, BLOCK_K):
            i = start + tl.arange(0, BLOCK_K)
            x = tl.load(
                x_ptr + row[:, None] * x_row_stride + i[None, :],
                mask=(m[:, None] < count) & (i[None, :] < IN),
                other=0.0,
            )
            a = tl.load(a_ptr + r[None, :] * IN + i[:, None], mask=(r[None, :] < rank) & (i[:, None] < IN), other=0.0)
            acc += tl.dot(x, a, input_precision="ieee")
        tl.store(
            narrow_ptr + row[:, None] * narrow_stride + r[None, :],
            acc * tl.load(scales_ptr + slot),
            mask=(m[:, None] < count) & (r[None, :] < rank),
        )


@triton.jit
def expand_tiles_kernel(
    y_ptr,
    tiles_ptr,
    slots_ptr,
    pointers_ptr,
    ranks_ptr,
    narrow_ptr,
    y_row_stride,
    narrow_stride,
    num_slots,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """As `expand_kernel`, for tiles."""
    first = tl.load(tiles_ptr + 2 * tl.program_id(0))
    count = tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    slot = tl.load(slots_ptr + first)
    rank = tl.load(ranks_ptr + slot)
    if rank > 0:
        m = tl.arange(0, ROWS)
        row = (first + m).to(tl.int64)
        o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
        b_ptr = _aligned(tl.load(pointers_ptr + num_slots + slot), y_ptr.dtype.element_ty)
        acc = tl.zeros([ROWS, BLOCK_O], tl.float32)
        for start in range(0, rank, BLOCK_R):
            r = start + tl.arange(0, BLOCK_R)
            narrow = tl.load(
                narrow_ptr + row[:, None] * narrow_stride + r[None, :],
                mask=(m[:, None] < count) & (r[None, :] < rank),
                other=0.0,
            )
            b = tl.load(b_ptr + r[:, None] * OUT + o[None, :], mask=(r[:, None] < rank) & (o[None, :] < OUT), other=0.0)
            acc += tl.dot(narrow.to(b.dtype), b, input_precision="ieee")
        place = y_ptr + row[:, None] * y_row_stride + o[None, :]
        is_own = (m[:, None] < count) & (o[None, :] < OUT)
        y = tl.load(place, mask=is_own, other=0.0).to(tl.float32)
        tl.store(place, (y + acc).to(y_ptr.dtype.element_ty), mask=is_own)
