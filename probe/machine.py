"""Compiled loops as machine code: kept on disk, and run through llvmlite alone, in a tenth of numba's time to start.

A loop is a function of :mod:`probe.loops`, whose arguments are pointers and numbers. What numba makes of it is written
as an object file whose name tells all that it depends on: the sources, the versions, the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from probe import files

SOURCES = ("machine.py", "kernels.py", "loops.py")
_WRAPPERS = re.compile(r'^define [^\n]*@"?(?:_ZN7cpython|cfunc\.)[^\n]*\{\n.*?^\}\n', re.MULTILINE | re.DOTALL)
_FREEING = re.compile(r"^declare (void @NRT_MemInfo_call_dtor\([^)]*\))[^\n]*$", re.MULTILINE)
_DECLARED = re.compile(r'^declare [^\n]*@"?([^"(\s]+)"?\(', re.MULTILINE)

_engines: list[Any] = []
"""What holds the loaded code: it lives as long as the process."""


class NoCodeError(Exception):
    """A loop's machine code needs something that only numba has."""


@dataclass(frozen=True)
class Loop:
    """One loop for one kind of values: its function in :mod:`probe.loops` and the types of its arguments and result.

    Types are numpy's names, those of pointers with a ``*`` behind.
    """

    function: str
    kind: str
    arguments: tuple[str, ...]
    result: str

    @property
    def name(self) -> str:
        """Return the name of its symbol and, with a key, of its file."""
        return f"probe{self.function}_{self.kind}"


def kept(loop: Loop) -> Callable[..., Any] | None:
    """Return a loop from its file, or None where there is none for this machine."""
    code = next(files.kept(_folders(), _file_name(loop)), None)
    return None if code is None else _runnable(loop, code)


def compiled(loop: Loop) -> Callable[..., Any]:
    """Compile a loop by numba, keep its machine code where a folder can be written, and return it."""
    code = _object(_renamed(loop))
    files.keep(_folders(), _file_name(loop), code)
    return _runnable(loop, code)


# -- where machine code is kept ---------------------------------------------------------------------------------------


def _folders() -> list[Path]:
    """Return the folders that may hold machine code, as numba chooses its own."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return files.shared_folders(Path(named))
    return files.cache_folders(Path(__file__).parent)


def _file_name(loop: Loop) -> str:
    return f"{loop.name}-{_key()}.o"


@cache
def _key() -> str:
    """Return what the machine code depends on, as 16 hexadecimal digits."""
    import llvmlite

    _, *processor = _target()
    found = importlib.util.find_spec("numba")
    numba = Path(str(found.origin)).with_name("_version.py").read_bytes() if found else b""
    sources = [(Path(__file__).with_name(name)).read_bytes() for name in SOURCES]
    parts = [*sources, numba, llvmlite.__version__.encode(), *(word.encode() for word in processor)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


# -- machine code -----------------------------------------------------------------------------------------------------


@cache
def _target() -> tuple[Any, str, str, str]:
    """Return LLVM's target of this machine, and the names of the target, of the processor and of its features."""
    from llvmlite import binding

    with contextlib.suppress(RuntimeError):  # newer versions need no call, and say so
        binding.initialize()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    triple, processor = binding.get_process_triple(), binding.get_host_cpu_name()
    features = binding.get_host_cpu_features().flatten()
    return binding.Target.from_triple(triple), triple, processor, features


def _target_machine() -> Any:
    """Return a new target machine of LLVM's: an engine owns the one that it is made with, and frees it."""
    target, _, processor, features = _target()
    return target.create_target_machine(
        cpu=processor, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def _renamed(loop: Loop) -> str:
    """Compile a loop by numba; return its LLVM code without the wrappers for Python, its symbol named by the loop."""
    import numba

    from probe import loops

    types = {name: getattr(numba.types, name) for name in {word.rstrip("*") for word in loop.arguments}}
    pointers = {f"{name}*": numba.types.CPointer(found) for name, found in types.items()}
    signature = tuple((types | pointers)[word] for word in loop.arguments)
    # not nnan and ninf: values that are not finite must be found
    options = {"nogil": True, "error_model": "numpy", "fastmath": {"contract", "reassoc", "nsz"}}
    dispatcher = numba.njit(**options)(getattr(loops, loop.function))
    dispatcher.compile(signature)
    code = _WRAPPERS.sub("", dispatcher.inspect_llvm(signature))
    code = _FREEING.sub(r"define \1 {\n  ret void\n}", code)  # arrays at given addresses are nobody's to free
    for name in _DECLARED.findall(code):
        if not name.startswith("llvm.") and len(re.findall(rf'@"?{re.escape(name)}"?\b', code)) > 1:
            raise NoCodeError(f"{loop.name} calls {name}")
    return code.replace(dispatcher.overloads[signature].fndesc.llvm_func_name, loop.name)


def _object(code: str) -> bytes:
    from llvmlite import binding

    module = binding.parse_assembly(code)
    module.verify()
    return bytes(_target_machine().emit_object(module))


def _runnable(loop: Loop, code: bytes) -> Callable[..., Any]:
    """Return a loop's machine code as a function of addresses and numbers; it releases the interpreter lock."""
    from llvmlite import binding

    target_machine = _target_machine()
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target_machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    kinds: Sequence[Any] = [_ctype(word) for word in loop.arguments]
    result = _ctype(loop.result)
    # numba's convention: the result and an error are left at two addresses, the status is 0
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.POINTER(result), ctypes.c_void_p, *kinds)
    function = prototype(engine.get_function_address(loop.name))

    def call(*arguments: Any) -> Any:
        found, error = result(), ctypes.c_void_p()
        status = function(ctypes.byref(found), ctypes.byref(error), *arguments)
        if status:
            raise RuntimeError(f"{loop.name} ended with status {status}")
        return found.value

    return call


def _ctype(word: str) -> Any:
    return ctypes.c_void_p if word.endswith("*") else getattr(ctypes, _CTYPES[word])


_CTYPES = {"float64": "c_double", "int64": "c_int64", "uint16": "c_uint16", "uint32": "c_uint32", "uint64": "c_uint64"}
