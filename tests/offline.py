"""Compiles what a launcher would launch, for any GPU and without one, and reads the machine code.

Needs Triton's compiler. Tensors may lie on the meta device: only their types are looked at.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# what a block may have of it, as the CUDA programming guide lists it by compute capability
SHARED_BYTES = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448}
CAPABILITY = {"sm_80": 80, "sm_86": 86, "sm_90": 90}
TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """A jitted kernel and the keyword arguments that its launcher passes."""

    kernel: Any
    arguments: dict[str, Any]


class Compiled(NamedTuple):
    """What the compiler made of a launch.

    Attributes:
        shared: bytes of shared memory.
        instructions: how often each stands in the code.
        products: the tensor cores' instructions with their shapes and types, such as HMMA.1688.F32.TF32.
        product_waits: how often the tensor cores are waited for.
        undefined: instructions that read a uniform register which nothing above has written.
        before_wait: as instructions, of those above the wait for the kernel before; all where there is none.
    """

    shared: int
    instructions: Counter[str]
    products: Counter[str]
    product_waits: int
    undefined: list[str]
    before_wait: Counter[str]

    @property
    def spills(self) -> int:
        return self.instructions["STL"] + self.instructions["LDL"]


def compiled(launch: Launch, arch: str, folder: Path) -> Compiled:
    """Compiles a launch as Triton would just before running it."""
    kernel, arguments = launch.kernel, dict(launch.arguments)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for at, parameter in enumerate(kernel.params):
        value = arguments.pop(parameter.name)
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[at,] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
            attributes[at,] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            dtype = TYPE_NAMES[value.base.dtype]
            signature[parameter.name] = f"tensordesc<{dtype}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[at,] = [["tt.divisibility", 16]]
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, signature, constants, attributes)
    arguments["enable_fp_fusion"] = True  # as `launch` does
    binary = triton.compile(source, target=GPUTarget("cuda", CAPABILITY[arch], 32), options=arguments)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # "/*0040*/   @P0 LDL.64 R4, [R1] ;"
    lines = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9][^;]*)", sass, flags=re.MULTILINE)
    names = [re.split(r"[. ]", line)[0] for line in lines]
    before = Counter(itertools.takewhile(lambda name: name != "ACQBULK", names))
    products = Counter(line.split()[0] for line in lines if re.match(r"HG?MMA\.", line))
    waits = sass.count("WARPGROUP.DEPBAR")
    undefined = undefined_reads(lines)
    return Compiled(binary.metadata.shared, Counter(names), products, waits, undefined, before)


def undefined_reads(lines: list[str]) -> list[str]:
    """Those of a kernel's instructions that read a uniform register above its first definition.

    A product is left out: it names a group of four, of which it may read two.
    """
    defined: set[int] = set()
    found = []
    for line in lines:
        operation, _, rest = line.strip().partition(" ")
        target, *sources = [operand.strip() for operand in rest.split(",")]
        written = re.fullmatch(r"UR(\d+)", target)
        if written is None:
            sources.append(target)
        read = {int(number) for source in sources for number in re.findall(r"\bUR(\d+)", source)}
        if "gdesc" not in line and not read <= defined:
            found.append(line.strip())
        defined |= read
        if written is not None:
            words = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
            defined.update(range(int(written[1]), int(written[1]) + words))
    return found
