"""Launches that all launchers share: planned once, and then with new addresses alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler import make_backend
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import streamattn.kernels.launch as launch_file
from streamattn.kernels import forward
from streamattn.kernels.launch import BY_LENGTH, UNSPECIALIZED


class FakeKernel:
    """A jitted kernel of two pointers that notes how it is launched, by Triton's way and by the short one."""

    __name__ = "fake_kernel"
    arg_names = ("x_ptr", "y_ptr", "stride_x_t", "q_len", "BLOCK_M")

    def __init__(self) -> None:
        self.by_triton: list[dict[str, Any]] = []
        self.short: list[tuple[Any, ...]] = []
        self.run: Any = lambda *arguments: self.short.append(arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def by_triton(**arguments: Any) -> Any:
            self.by_triton.append(arguments)
            return SimpleNamespace(run=self.run, function=7, packed_metadata=(4, 1, 0))

        return by_triton


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeKernel]:
    """A kernel, and a launch of it on rows [T] of a store with a tile of BLOCK_M."""
    kernel = FakeKernel()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    for name in ("_plans", "_compiled"):
        monkeypatch.setattr(launch_file, name, {})

    def launch_on(x: Tensor, y: Tensor | None = None, block: int = 16) -> FakeKernel:
        def arguments() -> tuple[int, dict[str, Any]]:
            return 5, {"stride_x_t": x.stride(0), "q_len": len(x), "BLOCK_M": block, "num_warps": 4}

        key = (x.shape, x.stride(), x.dtype, y is None, block)
        launch_file.launch(kernel, key, (x, y), arguments)
        return kernel

    return launch_on


def test_what_was_planned_is_launched_on_new_addresses(fake):
    first, second = torch.zeros(20), torch.zeros(20)
    kernel = fake(first)
    assert kernel.by_triton[0]["x_ptr"] is first
    assert kernel.by_triton[0]["enable_fp_fusion"] is True
    assert kernel.short == []
    fake(second)
    assert len(kernel.by_triton) == 1
    grid_and_stream, code, pointers = (
        (5, 1, 1, 11),
        (7, (4, 1, 0), None, None, None),
        (second.data_ptr(), None),
    )
    assert kernel.short == [(*grid_and_stream, *code, *pointers, 1, 20, 16)]


def test_a_new_length_is_planned_without_triton(fake):
    kernel = fake(torch.zeros(20))
    longer = torch.zeros(21)
    fake(longer)
    assert len(kernel.by_triton) == 1
    assert kernel.short[0][9:] == (longer.data_ptr(), None, 1, 21, 16)


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(20).half()},
        {"x": torch.zeros(40)[::2]},
        {"x": torch.zeros(21)[1:]},
        {"x": torch.zeros(32)},
        {"x": torch.zeros(20), "y": torch.zeros(20)},
        {"x": torch.zeros(20), "block": 32},
    ],
    ids=["dtype", "stride", "unaligned", "multiple of 16", "another pointer", "tile"],
)
def test_other_code_is_asked_of_triton(fake, other):
    kernel = fake(torch.zeros(20))
    fake(**other)
    assert len(kernel.by_triton) == 2
    assert kernel.short == []
    fake(**other)
    assert len(kernel.by_triton) == 2


def test_what_varies_under_a_key_is_passed_anew(fake):
    kernel = fake(torch.zeros(20))
    kernel.arg_names = ("x_ptr", "q_len", *reversed(BY_LENGTH), "BLOCK_M")
    x = torch.zeros(20)

    def grown(kv_len: int) -> None:
        lengths = (kv_len, 32 * kv_len, 16 * kv_len, 64 * kv_len, 16)
        others = {"q_len": 1, **dict(zip(BY_LENGTH, lengths, strict=True)), "BLOCK_M": 16}
        launch_file.launch(kernel, "decoding", (x,), lambda: (5, others), lengths)

    for kv_len in (7, 8, 9):
        grown(kv_len)
    assert len(kernel.by_triton) == 2
    assert [call[9:] for call in kernel.short] == [
        (x.data_ptr(), 1, 16, 64 * kv_len, 16 * kv_len, 32 * kv_len, kv_len, 16) for kv_len in (8, 9)
    ]


class Launcher:
    """A launcher of Triton's for a function in C, as `FakeKernel.run`."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Callable[..., None], memory: int = 0) -> None:
        self.launch, self.memory, self.called = launch, memory, 0

    def __call__(self, *arguments: Any) -> None:
        self.called += 1
        memory = torch.zeros(self.memory) if self.memory else None
        self.launch(memory, *arguments)


@pytest.mark.parametrize("memory", [0, 4])
def test_tritons_python_is_passed_by_unless_it_allocates(memory, fake):
    kernel = fake(torch.zeros(20))
    kernel.run = Launcher(kernel.run, memory)
    x = torch.zeros(20).half()
    for _ in range(3):
        fake(x)
    assert kernel.run.called == (2 if memory else 0)
    given = [arguments[0] for arguments in kernel.short[-2:]]
    assert [y if y is None else len(y) for y in given] == [memory or None] * 2
    assert memory == 0 or given[0] is not given[1]
    code, pointers = (7, (4, 1, 0), None, None, None), (x.data_ptr(), None)
    assert kernel.short[-1][1:] == (5, 1, 1, 11, *code, *pointers, 1, 20, 16)


def test_a_profiler_of_tritons_hears_of_each_launch(fake, monkeypatch):
    kernel = fake(torch.zeros(20))
    monkeypatch.setattr(launch_file, "_hooked", lambda: True)
    fake(torch.zeros(20))
    assert len(kernel.by_triton) == 2
    assert kernel.short == []


def again(kernel: FakeKernel, x: Tensor) -> bool:
    """Launches by the shortest way what `fake` launched on x and no y."""
    return launch_file.launch_again(kernel, (x.shape, x.stride(), x.dtype, True, 16), (x,), ())


def test_a_plan_is_launched_again_as_the_long_way_would(fake):
    x, store = torch.zeros(20), torch.zeros(21)
    kernel = fake(x)
    assert not again(kernel, torch.zeros(24))  # of which nothing is planned
    fake(store[1:])
    assert not again(kernel, store[1:])  # not at whole 16 bytes
    assert kernel.short == []
    fake(x)
    assert again(kernel, x)
    assert kernel.short[1] == kernel.short[0]


def test_a_profiler_of_tritons_has_nothing_launched_again(fake, monkeypatch):
    kernel = fake(torch.zeros(20))
    monkeypatch.setattr(launch_file, "_hooked", lambda: True)
    assert not again(kernel, torch.zeros(20))
    assert kernel.short == []


def test_a_call_of_a_kind_is_launched_again_as_its_first_was(fake, monkeypatch):
    """On other tensors and more keys, each argument in its place."""
    kernel = fake(torch.zeros(20))
    kernel.by_triton.clear()
    kernel.arg_names = tuple(forward.attention_fwd_kernel.arg_names)
    monkeypatch.setattr(forward, "attention_fwd_kernel", kernel)
    on_cpu = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(forward, "_empty_strided_cuda", on_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    options: Any = (None, None, None, None, None, None, 0.3, 40, 0, 2.0, 0.0)

    def inputs(kv_len: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.randn(2, 1, 4, 64, dtype=dtype).transpose(1, 2)
        return q, torch.randn(2, 2, kv_len, 64, dtype=dtype), torch.randn(2, 2, kv_len, 32, dtype=dtype)

    q, k, v = inputs(100)
    forward.attention_forward(q, k, v, *options, kind="a kind")
    repeat = forward.repeat_attention_forward(q, v, "a kind")
    q, k, v = inputs(117)
    served = repeat(q, k, v)
    assert served is not None
    out, lse = served
    assert len(kernel.by_triton) == len(kernel.short) == 1
    short = dict(zip(kernel.arg_names, kernel.short[0][9:], strict=True))
    launch_file._compiled.clear()
    want_out, want_lse = forward.attention_forward(q, k, v, *options)
    for got, want in ((out, want_out), (lse, want_lse)):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
    assert list(short.values())[:5] == [x.data_ptr() for x in (q, k, v, out, lse)]
    names = [name for name in kernel.arg_names[5:] if name != "heads_per_group"]  # for the cache alone
    assert {name: short[name] for name in names} == {name: kernel.by_triton[1][name] for name in names}
    assert (short["kv_len"], short["stride_k_h"], short["window_left"]) == (117, 117 * 64, 40)

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    assert repeat(q, k, v) is None


class Encoders:
    """Stands for Triton's driver: notes each tensor map that it encodes, and gives out what it was told."""

    def __init__(self) -> None:
        self.encoded: list[tuple[Any, ...]] = []

    def fill_tma_descriptor(self, *arguments: Any) -> tuple[Any, ...]:
        self.encoded.append(plain(arguments))
        return "map", self.encoded[-1]

    fill_tma_descriptor_tiled = fill_tma_descriptor


def plain(x: Any) -> Any:
    """Lists and tuples alike, and of tensors the addresses, as the functions in C take them."""
    if isinstance(x, Tensor):
        return x.data_ptr()
    return tuple([plain(y) for y in x]) if isinstance(x, list | tuple) else x


class MapKernel:
    """A kernel that reads x by TMA and y not, below it Triton's own Python and no function in C."""

    __name__ = "map_kernel"
    arg_names = ("x_desc", "y_ptr", "seed_ptr", "q_len", *reversed(BY_LENGTH), "BLOCK_M")

    def __init__(self, launched: Callable[..., None]) -> None:
        self.by_triton, self.runs = 0, True
        signature: dict[str, str] = dict.fromkeys(self.arg_names, "i32")
        signature.update(x_desc="tensordesc<bf16[1,1,16,64]>", y_ptr="*fp32")
        signature.update(seed_ptr="constexpr", BLOCK_M="constexpr")
        map_of = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 16, 64]}
        self.map_of = {**map_of, "fp4_padded": False}
        self.run: Any = CudaLauncher.__new__(CudaLauncher)
        self.run.launch = wrap_handle_tensordesc(launched, signature, [self.map_of])
        self.run.arg_annotations, self.run.kernel_signature, self.run.num_ctas = [], b"", 1
        self.run.launch_cooperative_grid = self.run.launch_pdl = self.run.gsan_enabled = False
        for kind in ("global", "profile"):
            setattr(self.run, f"{kind}_scratch_size", 0)
            setattr(self.run, f"{kind}_scratch_align", 1)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def by_triton(**arguments: Any) -> Any:
            self.by_triton += 1
            values = [arguments[name] for name in self.arg_names]
            if self.runs:
                self.run(*grid, 11, 7, (4, 1, 0), None, None, None, *values)
            return SimpleNamespace(run=self.run, function=7, packed_metadata=(4, 1, 0))

        return by_triton


class Maps:
    """Launches a `MapKernel`, and keeps what a GPU would be told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.driver = Encoders()
        self.launched: list[tuple[Any, ...]] = []
        self.kernel = MapKernel(lambda *arguments: self.launched.append(plain(arguments)))

    @property
    def encoded(self) -> list[tuple[Any, ...]]:
        return self.driver.encoded

    def __call__(
        self, x: Tensor, y: Tensor, block: int = 16, swizzle: int = 128, kv_len: int | None = None
    ) -> tuple[Any, ...]:
        """Launches on x [B, H, T, 64] and y [T]; returns what arrived at the function in C.

        A ``kv_len`` and the strides that grow with it vary under one key.
        """
        lengths = tuple([(kv_len or 0) * factor for factor in (1, 32, 16, 64, 128)])
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=4)
        strides, shape = list(x.stride()), list(x.shape)
        width = swizzle // 2

        def arguments() -> tuple[int, dict[str, Any]]:
            descriptor = TensorDescriptor(x, shape, strides, [1, 1, block, width], layout)
            others = {"q_len": len(y), "BLOCK_M": block, "num_warps": 4}
            return 5, {"x_desc": descriptor, **dict(zip(BY_LENGTH, lengths, strict=True)), **others}

        # what the compiler would say of the descriptor
        self.kernel.map_of.update(block_size=[1, 1, block, width], elem_type=10 - (x.dtype == torch.float16))
        self.kernel.map_of.update(swizzle={64: 2, 128: 3}[swizzle])
        key = (x.shape, x.stride(), x.dtype, y.shape, block, swizzle)
        varying = () if kv_len is None else lengths
        launch_file.launch(self.kernel, (key, kv_len is None), (x, y, None), arguments, varying)
        return self.launched[-1]

    def by_triton(self, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """The same, every time by Triton's own way."""
        with self.monkeypatch.context() as patched:
            patched.setattr(launch_file, "_hooked", lambda: True)
            return self(*arguments, **options)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> Maps:
    made = Maps(monkeypatch)
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=made.driver), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 11, raising=False)
    for name in ("_plans", "_compiled"):
        monkeypatch.setattr(launch_file, name, {})
    monkeypatch.setattr(launch_file, "_maps", weakref.WeakValueDictionary())
    monkeypatch.setattr(launch_file._Maps, "held", 0)
    return made


def rows(length: int = 40, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(2, 3, length, 64, dtype=dtype)


def test_the_short_way_and_tritons_give_the_same_to_the_functions_in_c(maps):
    x, y = rows(), torch.zeros(20)
    first = maps(x, y)
    assert maps.kernel.by_triton == 1
    encoded = maps.encoded[0]
    assert maps(x, y) == first
    assert maps.kernel.by_triton == 1
    assert maps.encoded == [encoded, encoded]
    other_x, other_y = rows(), torch.zeros(20)
    short = maps(other_x, other_y)
    assert maps.kernel.by_triton == 1
    assert maps.by_triton(other_x, other_y) == short
    assert maps.kernel.by_triton == 2
    assert maps.encoded[-1] == maps.encoded[-2] == (other_x.data_ptr(), *encoded[1:])


def test_a_kernel_that_starts_early_does_so_the_short_way_too(maps):
    x, y = rows(), torch.zeros(20)
    maps(x, y)
    in_order = maps(x, y)
    launch_file._plans.clear()
    launch_file._compiled.clear()
    maps.kernel.run.launch_pdl = True
    early = maps(x, y)
    assert maps(x, y) == early
    assert maps.kernel.by_triton == 2
    assert [(a, b) for a, b in zip(in_order, early, strict=True) if a != b] == [(False, True)]


def test_a_map_is_encoded_once_for_an_address(maps):
    x, y, other = rows(), torch.zeros(20), rows()
    maps(x, y)
    encoded = []
    for tensor in (x, x, other, x, other):
        maps(tensor, torch.zeros(20))
        encoded.append(len(maps.encoded))
    assert encoded == [2, 2, 3, 3, 3]
    assert maps.kernel.by_triton == 1


def test_plans_share_a_map(maps):
    """It depends on address and layout alone."""
    x, y = rows(), torch.zeros(20)
    maps(x, y)
    maps(x, y)
    maps(x, torch.zeros(32))
    assert len(launch_file._plans) == 2
    maps(x, torch.zeros(32))
    assert len(launch_file._maps) == 1
    assert len(maps.encoded) == 3  # two by Triton's way, for other code


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda x: x[:, :, :32], {}),
        (lambda x: x[:, :2], {}),
        (lambda x: x[:1], {}),
        (lambda x: x.as_strided(x.shape, (3 * 64 * 40, 64, 3 * 64, 1)), {}),
        (lambda x: x.view(torch.float16), {}),
        (lambda x: x, {"block": 32}),
        (lambda x: x, {"swizzle": 64}),
    ],
    ids=["length", "heads", "batch", "strides", "dtype", "block", "swizzle"],
)
def test_what_makes_another_map_is_never_given_an_old_one(change, options, maps):
    x, y = rows(), torch.zeros(20)
    for _ in range(2):
        maps(x, y)
    other = change(x)
    assert other.data_ptr() == x.data_ptr()
    for _ in range(2):
        maps(other, y, **options)
    assert maps.encoded[-1] != maps.encoded[0]
    assert maps.encoded[-1][0] == x.data_ptr()
    # what was last launched is what Triton would have made of it, and the old map is still there
    short = maps(other, y, **options)
    encodings = len(maps.encoded)
    assert maps(x, y) != short
    assert len(maps.encoded) == encodings
    assert maps.by_triton(other, y, **options) == short


def test_each_gpu_has_its_own_maps(maps, monkeypatch):
    x, y = rows(), torch.zeros(20)
    for device in (0, 1):
        monkeypatch.setattr(Tensor, "get_device", lambda self, device=device: device)
        for _ in range(2):
            maps(x, y)
    assert len(launch_file._maps) == 2
    assert maps.kernel.by_triton == 2


def test_a_new_length_of_a_descriptor_is_planned_without_triton(maps):
    y = torch.zeros(20)
    maps(rows(40), y)
    x = rows(41)
    short = maps(x, y)
    assert maps.kernel.by_triton == 1
    assert maps.by_triton(x, y) == short


def test_what_varies_finds_its_places_in_c(maps):
    x, y = rows(), torch.zeros(20)
    maps(x, y, kv_len=7)
    for kv_len in (9, 11, 13):
        short = maps(x, y, kv_len=kv_len)
        assert maps.kernel.by_triton == 1
        assert maps.by_triton(x, y, kv_len=kv_len) == short
        maps.kernel.by_triton = 1
    assert len(launch_file._plans) == 1


def test_a_launch_of_another_thread_in_between_changes_nothing(maps, monkeypatch):
    x, y = rows(), torch.zeros(20)
    maps(x, y)
    alone = maps(x, y)
    others = [(rows(), torch.zeros(20))]

    def interrupted(device: int) -> int:
        if others:
            maps(*others.pop())
        return 11

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", interrupted)
    assert maps(x, y) == alone
    assert not others


def test_code_depends_on_the_block_of_a_descriptor_and_on_no_length():
    def code(length: int, block: int, swizzle: int) -> Any:
        layout = NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=16, rank=4)
        x = rows(length)
        shape, strides = list(x.shape), list(x.stride())
        descriptor = TensorDescriptor(x, shape, strides, [1, 1, block, 32], layout)
        return launch_file._code_key((x,), {"x_desc": descriptor})

    assert code(40, 16, 64) == code(41, 16, 64)
    assert len({code(40, 16, 64), code(40, 32, 64), code(40, 16, 32)}) == 3


def test_maps_are_bounded(maps, monkeypatch):
    monkeypatch.setattr(launch_file, "_MAX_MAPS", 3)
    y = torch.zeros(20)
    tensors = [rows(length) for length in (40, 41, 40, 41, 40)]
    for _ in range(3):
        for x in tensors:
            short = maps(x, y)
            assert sum(len(kept) for kept in launch_file._maps.values()) <= 3
            assert maps.by_triton(x, y) == short


def test_plans_and_their_maps_are_bounded(maps, monkeypatch):
    monkeypatch.setattr(launch_file, "_MAX_PLANS", 4)
    y = torch.zeros(20)
    for length in range(33, 47):
        maps(rows(length), y)
        maps(rows(length), y)
        assert len(launch_file._plans) <= 4
        assert len(launch_file._maps) <= 4
        assert launch_file._Maps.held == sum(len(kept) for kept in launch_file._maps.values())


def test_maps_of_a_plan_that_is_held_elsewhere_are_bounded_with_the_others(maps, monkeypatch):
    monkeypatch.setattr(launch_file, "_MAX_PLANS", 2)
    monkeypatch.setattr(launch_file, "_MAX_MAPS", 6)
    y = torch.zeros(20)
    held = []
    for length in range(33, 47):
        for _ in range(2):
            maps(rows(length), y)
        held += [plan for plan in launch_file._plans.values() if plan not in held]
        alive = [kept for plan in held for _, kept in plan.pointers if kept is not None]
        assert len(held) > 1 or length == 33
        assert sum(len(kept) for kept in alive) <= 6


@pytest.mark.parametrize(
    "change",
    [
        lambda run, launched: setattr(run, "global_scratch_size", 8),
        lambda run, launched: setattr(run, "profile_scratch_size", 8),
        lambda run, launched: delattr(run, "profile_scratch_size"),
        lambda run, launched: setattr(run, "gsan_enabled", True),
        # a launcher under another name, and one in C
        lambda run, launched: setattr(run, "launch", lambda *given, c=run.launch: c(*given)),
        lambda run, launched: setattr(run, "launch", launched.append),
    ],
    ids=["scratch", "profiled", "no scratch", "sanitized", "renamed", "in C"],
)
def test_where_tritons_python_is_another_its_own_way_is_taken(change, maps):
    """Each launch, as the addresses in a descriptor are not to be found."""
    change(maps.kernel.run, maps.launched)
    maps.kernel.runs = False  # the changed one could not
    maps.launched.append(())
    x, y = rows(), torch.zeros(20)
    for count in (1, 2, 3):
        maps(x, y)
        assert maps.kernel.by_triton == count
    assert not launch_file._maps


def test_numbers_of_one_code_are_one_to_triton():
    """What it asks of a number before it compiles, whether it may bake in what it learns or not."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    numbers = [
        0,
        1,
        2,
        8,
        15,
        16,
        17,
        32,
        -1,
        -16,
        *(2**31 + i for i in (-16, -1, 0, 1, 16)),
        -(2**31),
        2**40,
    ]
    asked: dict[Any, set[Any]] = {}
    for number in numbers:
        code = launch_file._code_key((), {"stride_x_t": number})
        assert code == launch_file._code_key((), {UNSPECIALIZED[0]: number})
        asked.setdefault(code, set()).add(
            tuple(
                native_specialize_impl(backend, number, False, specialize, True)
                for specialize in (True, False)
            )
        )
    assert all(len(answers) == 1 for answers in asked.values()), asked
    assert len(asked) < len(numbers)
    assert launch_file._code_key((), {"BLOCK_M": 2}) != launch_file._code_key((), {"BLOCK_M": 8})
