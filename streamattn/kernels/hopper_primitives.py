"""Gluon steps of kernels for Hopper: instructions that Triton has no word for, dropout, softcap."""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from streamattn.kernels.primitives import LOG2E, PHILOX_ROUNDS

# Triton takes the named barriers below this one for itself
FIRST_BARRIER = gl.constexpr(8)
PHILOX_A = gl.constexpr(0xD2511F53)
PHILOX_B = gl.constexpr(0xCD9E8D57)
PHILOX_KEY_A = gl.constexpr(0x9E3779B9)
PHILOX_KEY_B = gl.constexpr(0xBB67AE85)

# Triton 3.9 gave the copies new names
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@builtin
def add_out(tensor_desc, coord, src, _semantic=None):
    """Adds a tile of shared memory to global memory by TMA; Triton 3.6 has no function for it."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    add = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(add, tensor_desc.handle, coord, src.handle)


@gluon.jit
def program_again():
    """`program_id(0)`, read anew: what is computed from it takes no registers before."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %ctaid.x; add.u32 $0, $0, $1;",
        "=r,r",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def await_kernel_before():
    """Waits until the kernel that was launched before this one is done, and what it wrote is seen."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exp2(x):
    """2^x, one instruction: results below 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """1 / x to one unit in the last place, one instruction: 0 for infinity."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def at_barrier(ASM: gl.constexpr, index, threads):
    """An instruction on a named barrier of so many threads, by all threads of a warp."""
    gl.inline_asm_elementwise(
        ASM,
        "=r,r,r",
        [gl.to_tensor(index), gl.to_tensor(threads)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def release(index, threads):
    """Hands a buffer back: this warp arrives at the named barrier and waits for nobody.

    An mbarrier's arrival would make the warps of a consumer wait for one another first.
    """
    at_barrier("bar.arrive $1, $2; mov.u32 $0, 0;", index, threads)


@gluon.jit
def await_release(index, threads):
    """The producer's side of `release`."""
    at_barrier("bar.sync $1, $2; mov.u32 $0, 0;", index, threads)


@gluon.jit
def await_turn(count_ptr, turn):
    """Waits until a counter in global memory, which only `pass_on` changes, says turn; by all of one warp.

    What was done before that `pass_on` is then seen, by TMA too. A counter that never says it, which can only
    be a fault, ends the kernel with an error after a minute or two, and not never.
    """
    gl.inline_asm_elementwise(
        """{
            .reg .pred done, late;
            .reg .b32 count, polls;
            mov.b32 polls, 0;
        ASK:
            ld.acquire.gpu.global.b32 count, [$1];
            setp.eq.s32 done, count, $2;
            vote.sync.all.pred done, done, 0xffffffff;
            @done bra TURN;
            add.u32 polls, polls, 1;
            setp.gt.u32 late, polls, 0x8000000;
            @late trap;
            bra ASK;
        TURN:
            fence.proxy.async.global;
            mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [count_ptr, gl.to_tensor(turn)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def pass_on(count_ptr, turn):
    """Sets the counter of `await_turn` when all that this warp has begun to add by TMA is in global memory.

    `store_wait` is not enough: it says that shared memory was read.
    """
    gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .b32 lane;
            cp.async.bulk.wait_group 0;
            bar.warp.sync 0xffffffff;
            mov.b32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            @first st.release.gpu.global.b32 [$1], $2;
            mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [count_ptr, gl.to_tensor(turn)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def softcapped(s, scale, softcap):
    """softcap * tanh(scale * s / softcap) in base 2, from products s; by 1 - 2 / (1 + e^(2 x)).

    Its absolute error, which is what an exponential feels, is some 2^-22 of the softcap.
    """
    slope = gl.minimum(2.0 * LOG2E * scale / softcap, 3e38)  # infinity times 0 would be NaN
    e = exp2(s * slope)
    cap2 = softcap * LOG2E
    return cap2 - 2.0 * cap2 * reciprocal(1.0 + e)


@gluon.jit
def softcapped_slope(s, scale, softcap):
    """(softcapped scores in base 2, derivative of the capping), from products s."""
    slope = gl.minimum(2.0 * LOG2E * scale / softcap, 3e38)
    r = reciprocal(1.0 + exp2(s * slope))
    cap2 = softcap * LOG2E
    return cap2 - 2.0 * cap2 * r, 4.0 * (r - r * r)  # tanh = 1 - 2 r


@gluon.jit
def philox(seed, c0, c1, c2):
    """Four uint32 of the counter (c0, c1, c2, 0), as `triton.language.philox`."""
    k0 = seed.to(gl.uint32)
    k1 = (seed >> 32).to(gl.uint32)
    c3 = gl.zeros_like(c0)
    for _ in gl.static_range(PHILOX_ROUNDS):
        x = c0.to(gl.uint64) * PHILOX_A  # one instruction, where two halves of a product would be two
        y = c2.to(gl.uint64) * PHILOX_B
        c0 = (y >> 32).to(gl.uint32) ^ c1 ^ k0
        c1 = y.to(gl.uint32)
        c2 = (x >> 32).to(gl.uint32) ^ c3 ^ k1
        c3 = x.to(gl.uint32)
        k0 += PHILOX_KEY_A
        k1 += PHILOX_KEY_B
    return c0, c1, c2, c3


@gluon.constexpr_function
def call_layout(block_n):
    """Layout [64, block_n / 16] of generator calls: a call lies in the thread that holds its keys' scores."""
    blocks = [[0, 4 << i] for i in range((block_n // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[8, 0], *blocks],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, block_n // 16],
    )


@gluon.jit
def random_words(seed, head, i_first, first_key, BLOCK_N: gl.constexpr):
    """Four uint32 [64, BLOCK_N / 16] for `drop`; see `primitives.keep_tile`.

    A thread of a warpgroup's product holds just the 16 keys of a block of 64 which one call of the generator
    serves.
    """
    CALLS: gl.constexpr = BLOCK_N // 16
    LAYOUT: gl.constexpr = call_layout(BLOCK_N)
    rows = i_first + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    calls = first_key // 16 + gl.arange(0, CALLS, layout=gl.SliceLayout(0, LAYOUT))
    zeros = gl.zeros([64, CALLS], gl.uint32, layout=LAYOUT)
    c0 = zeros + rows.to(gl.uint32)[:, None]
    c1 = zeros + calls.to(gl.uint32)[None, :]
    return philox(seed, c0, c1, zeros + head.to(gl.uint32))


@gluon.constexpr_function
def narrow_and_drop(half):
    """PTX: two probabilities as one pair of 16 bits, each 0 where its random number is below the limit.

    The numbers and limits are pairs of float16, which one instruction compares.
    """
    return (
        "{ .reg .b32 kept; set.ge.u32.f16x2 kept, $3, $4; "
        f"cvt.rn.{half}x2.f32 $0, $2, $1; and.b32 $0, $0, kept; }}"
    )


@gluon.constexpr_function
def narrow_pair(half):
    """PTX: two probabilities as one pair of 16 bits."""
    return f"cvt.rn.{half}x2.f32 $0, $2, $1;"


@gluon.jit
def two_bytes(words, PRMT: gl.constexpr):
    """Two bytes of each word as 1024 + byte, a pair of float16."""
    return gl.inline_asm_elementwise(PRMT, "=r,r", [words], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def drop(p, words, drop_threshold, dtype: gl.constexpr):
    """p [64, BLOCK_N] of a product, 0 where dropped, in pairs of 16 bits: uint32 [64, BLOCK_N / 2].

    Carried from one tile to the next as single 16-bit values, they would be taken apart and put together.
    """
    BLOCK_N: gl.constexpr = p.shape[1]
    HALF: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    even, odd = gl.split(p.reshape([64, BLOCK_N // 2, 2]))
    w0, w1, w2, w3 = words
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3)).reshape([64, BLOCK_N // 64, 4, 4])
    # [M, block, c, word]
    first = two_bytes(words, "prmt.b32 $0, $1, 0x64646464, 0x4140;")
    second = two_bytes(words, "prmt.b32 $0, $1, 0x64646464, 0x4342;")
    drawn = gl.join(first, second).permute([0, 1, 3, 4, 2]).reshape([64, BLOCK_N // 2])
    drawn = gl.convert_layout(drawn, even.type.layout)
    limit = (drop_threshold | (drop_threshold << 16)) | 0x64006400
    return gl.inline_asm_elementwise(
        narrow_and_drop(HALF), "=&r,f,f,r,r", [even, odd, drawn, limit], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def in_pairs(p, dtype: gl.constexpr):
    """p [64, BLOCK_N] of a product in pairs of 16 bits: uint32 [64, BLOCK_N / 2]."""
    even, odd = gl.split(p.reshape([64, p.shape[1] // 2, 2]))
    HALF: gl.constexpr = "bf16" if dtype == gl.bfloat16 else "f16"
    CONVERT: gl.constexpr = narrow_pair(HALF)
    return gl.inline_asm_elementwise(CONVERT, "=r,f,f", [even, odd], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """[64, BLOCK_N] from such pairs, in the layout of an operand of a product: nothing moves."""
    twice = gl.join(pairs, pairs).reshape([64, 2 * pairs.shape[1]])
    p = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r", [twice], dtype=dtype.value, is_pure=True, pack=2
    )
    return gl.convert_layout(p, LAYOUT)


@gluon.constexpr_function
def bits_layout():
    """Of a warpgroup's product [64 keys, 64 queries] as [4, 2, 4, 2 keys, 8, 8 queries]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 0, 0, 4, 0]],
        [[0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 4], [0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]],
        [],
        [4, 2, 4, 2, 8, 8],
    )


@gluon.jit
def not_below(words, limit, PRMT: gl.constexpr):
    """All ones in each half of a word whose byte is not below the limit's."""
    return gl.inline_asm_elementwise(
        "set.ge.u32.f16x2 $0, $1, $2;",
        "=r,r,r",
        [two_bytes(words, PRMT), limit],
        dtype=gl.uint32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def draw_bits(seed, head, i_first, first_key, drop_threshold, bits_smem):
    """What dropout keeps of 64 queries and 64 keys, in shared memory: uint32 [4, 4, 8], for `kept`.

    A call of the generator serves 16 keys of one query, which lie in many threads of a product [keys,
    queries] (see `primitives.keep_tile`). So each is made once, and its word w, the keys 16 w + (0, 1, 8, 9)
    + 2 c of call c, gives four bits of bits[w, c, i % 8], from 4 (i // 8) on.
    """
    LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1, 0]],
        [[0, 0, 2, 0], [0, 0, 4, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]],
        [[0, 1, 0, 0], [0, 2, 0, 0]],
        [],
        [1, 4, 8, 8],
    )
    CALLS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    EIGHTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    ONES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    calls = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=CALLS)[None, :], 2), 3)
    eights = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=EIGHTS)[None, :], 1), 3)
    ones = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=ONES)[None, :], 1), 2)
    zeros = gl.zeros([1, 4, 8, 8], gl.uint32, layout=LAYOUT)
    c0 = zeros + (i_first + eights * 8 + ones).to(gl.uint32)
    c1 = zeros + (first_key // 16 + calls).to(gl.uint32)
    words = philox(seed, c0, c1, zeros + head.to(gl.uint32))
    limit = zeros + ((drop_threshold | (drop_threshold << 16)) | 0x64006400).to(gl.uint32)
    for w in gl.static_range(4):
        first = not_below(words[w], limit, "prmt.b32 $0, $1, 0x64646464, 0x4140;")
        second = not_below(words[w], limit, "prmt.b32 $0, $1, 0x64646464, 0x4342;")
        four = (first & 0x00020001) | (second & 0x00080004)
        four = ((four | (four >> 16)) & 15) << (eights * 4).to(gl.uint32)
        bits_smem.slice(w, 1).store(gl.sum(four, 2))


@gluon.jit
def kept(bits_smem, S_LAYOUT: gl.constexpr):
    """bool [64 keys, 64 queries] in the layout of a warpgroup's product, from `draw_bits`: nothing moves."""
    LAYOUT: gl.constexpr = bits_layout()
    HELD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT)))
    bits = gl.expand_dims(gl.expand_dims(gl.expand_dims(bits_smem.load(HELD), 1), 3), 4)
    bits = (bits >> along(2, 3).to(gl.uint32)) | gl.zeros([4, 2, 4, 2, 8, 8], gl.uint32, layout=LAYOUT)
    # in any one place a constant: one instruction tests it
    place = 1 << (along(2, 1) * 2 + along(8, 4) * 4).to(gl.uint32)
    return gl.convert_layout(((bits & place) != 0).reshape([64, 64]), S_LAYOUT)


@gluon.constexpr_function
def along_layout(dim):
    """Of a vector along one dimension of `bits_layout`."""
    layout = bits_layout()
    for other in range(5, -1, -1):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def along(SIZE: gl.constexpr, DIM: gl.constexpr):
    """0, 1, ... SIZE - 1 along one dimension of `bits_layout`, 1 in the others."""
    x = gl.arange(0, SIZE, layout=along_layout(DIM))
    for other in gl.static_range(6):
        if other != DIM:
            x = gl.expand_dims(x, other)
    return x
