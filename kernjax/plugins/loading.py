"""`--kernel OP=module:function[@layers=3]`: finds the function, refuses what cannot stand in."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kernjax.base.errors import UserError
from kernjax.base.hashing import sha256_bytes, sha256_file
from kernjax.plugins.kernel import Kernel, one_line, signature
from kernjax.precision.fields import LayerPolicy, nearest
from kernjax.precision.grammar import parse_layers
from kernjax.precision.policy import spans_text
from kernjax.precision.sites import kind_of
from pallas_kernels.ops import OPS

_OURS = ("kernjax", "pallas_kernels")

_FORM = "A kernel is named OP=module:function, e.g. attention.prefill=my_package.my_module:prefill."


def load_kernels(specs: Iterable[str]) -> dict[str, Kernel]:
    """The kernels by op; UserError for one that cannot be used, and for two of the same op."""
    kernels: dict[str, Kernel] = {}
    for spec in specs:
        kernel = load_kernel(spec)
        if kernel.op in kernels:
            raise UserError(
                f"--kernel names {kernel.op} twice: {kernels[kernel.op].name} and {kernel.name}.",
                "One function an op.",
            )
        kernels[kernel.op] = kernel
    return kernels


def load_kernel(spec: str) -> Kernel:
    """The function that `OP=module:function` names; modules are found as in `python -m`.

    `@layers=3,5-7` behind it restricts the kernel to these layers, counted from 0.

    UserError for an unknown op, a module that does not import, a missing or uncallable attribute,
    and a signature that does not take what the op is called with.
    """
    op, _, name = (part.strip() for part in spec.partition("="))
    name, at, layers = (part.strip() for part in name.partition("@"))
    module_name, _, attribute = name.partition(":")
    if op not in OPS:
        raise UserError(
            f"--kernel {spec}: {op!r} is no op.",
            f"Ops: {', '.join(OPS)}.",
            nearest(op, OPS, "Did you mean {}?") or _FORM,
        )
    if not (module_name and attribute.isidentifier()):
        raise UserError(f"--kernel {spec}: {name!r} is not module:function.", _FORM)
    module = _import(spec, module_name)
    function = _function(spec, module, attribute)
    _check_signature(spec, op, function)
    spans = parse_layers(f"--kernel {spec}", layers) if at else ()
    return Kernel(op, name, function, _source_hash(spec, module, function), spans)


def check_policy(kernels: Mapping[str, Kernel], policy: LayerPolicy) -> None:
    """UserError when the policy also chooses an implementation for an op that a kernel computes."""
    for op, kernel in kernels.items():
        if (implementation := policy.implementation(op)) is not None:
            raise UserError(
                f"--kernel gives {op} to {kernel.name}, the policy to {implementation!r}.",
                todo=f"Drop the kernel or {op}.implementation.",
            )


def check_layers(kernels: Mapping[str, Kernel], layer_types: Sequence[str]) -> None:
    """UserError for a kernel whose layers the model lacks, or that never run its op."""
    for op, kernel in kernels.items():
        fitting = [i for i, kind in enumerate(layer_types) if kind == kind_of(f"{op}.")]
        for first, last in kernel.layers:
            if last >= len(layer_types) or not any(first <= i <= last for i in fitting):
                raise UserError(
                    f"Kernel {kernel.name}@layers={spans_text(kernel.layers)}: there is no {op} in"
                    f" layers {first}-{last}.",
                    f"Layers that run it: {', '.join(map(str, fitting)) or 'none'}.",
                )


def check_lse(kernels: Mapping[str, Kernel]) -> None:
    """UserError for an attention kernel that returns no log-sum-exp: keys in parts need it."""
    for op, kernel in kernels.items():
        if op.startswith("attention.") and not kernel.gives_lse:
            raise UserError(
                f"Kernel {kernel.name} for {op} does not take return_lse: on a mesh that splits the"
                " keys over `sequence` its outputs for the parts could not be merged.",
                "With return_lse=True a kernel returns (outputs [B, T, N, Hv], lse [B, T, N]), both"
                " float32; q_offset is negative where a part lies behind the queries.",
                "Add the parameter, or choose a --mesh without sequence.",
            )


def check_called(kernels: Mapping[str, Kernel]) -> None:
    """UserError when a kernel was loaded but no model was traced through it."""
    if idle := [kernel for kernel in kernels.values() if not kernel.was_called]:
        raise UserError(
            "; ".join(f"Kernel {kernel.name} for {kernel.op} was never called" for kernel in idle)
            + ": the result says nothing about it.",
            todo="Use a model with layers, and a corpus with windows or steps, that run the op.",
        )


def _import(spec: str, name: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        raise UserError(f"--kernel {spec}: {name!r} is a file's path.", _FORM)
    # A console script, unlike `python -m`, does not look into the current directory.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _no_import(spec, name, error) from error
        raise UserError(
            f"--kernel {spec}: there is no module {error.name!r}.",
            f"Modules are found from {os.getcwd()} and the installed packages.",
        ) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may even call sys.exit()
        raise _no_import(spec, name, error) from error


def _no_import(spec: str, name: str, error: BaseException) -> UserError:
    return UserError(f"--kernel {spec}: module {name!r} does not import: {one_line(error)}.")


def _function(spec: str, module: ModuleType, attribute: str) -> Callable[..., Any]:
    known = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
    own = [n for n in known if getattr(vars(module)[n], "__module__", "") == module.__name__]
    if not hasattr(module, attribute):
        raise UserError(
            f"--kernel {spec}: module {module.__name__!r} has no {attribute!r}.",
            f"Functions there: {', '.join(own or known) or 'none'}.",
            nearest(attribute, known, "Did you mean {}?"),
        )
    function = getattr(module, attribute)
    if not callable(function):
        raise UserError(
            f"--kernel {spec}: {attribute!r} is a {type(function).__name__}, not a function.",
            f"Functions there: {', '.join(own or known) or 'none'}.",
        )
    return function


def _check_signature(spec: str, op: str, function: Callable[..., Any]) -> None:
    called_with = signature(op).parameters.values()
    try:
        own = inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError(
            f"--kernel {spec}: its parameters cannot be read.",
            "A kernel is a Python function.",
            "Wrap it in one.",
        ) from None
    positional = [p.name for p in called_with if p.kind is not p.KEYWORD_ONLY]
    keywords = [p.name for p in called_with if p.kind is p.KEYWORD_ONLY]
    parameters = own.parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    missing = [] if takes_any else [name for name in keywords if name not in named]
    if missing:
        raise UserError(
            f"--kernel {spec}: it does not take {', '.join(missing)}.",
            f"{_short_call(op, positional, keywords)}.",
            "Add the parameters, or **unused.",
        )
    try:
        own.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        raise UserError(
            f"--kernel {spec}: it cannot be called: {error}.",
            f"{_short_call(op, positional, keywords)}.",
        ) from None


def _short_call(op: str, positional: list[str], keywords: list[str]) -> str:
    return f"{op} is called as f({', '.join([*positional, *(f'{k}=' for k in keywords)])})"


def _source_hash(spec: str, module: ModuleType, function: Callable[..., Any]) -> str:
    """sha256 of the source behind a kernel: an edit of it is another kernel.

    One file: its hash. Otherwise of all hashes: the named module, the file that defines the
    function, and what these import from outside the installed packages, in the order of names.
    """
    files: dict[str, str] = {}
    waiting = [module, inspect.getmodule(inspect.unwrap(function))]
    while waiting:
        found = waiting.pop()
        path = getattr(found, "__file__", None)
        if found is None or path is None or found.__name__ in files or _is_installed(path):
            continue
        if found is not module and found.__name__.partition(".")[0] in _OURS:
            continue  # the manifest's commit says which
        files[found.__name__] = sha256_file(path)
        for value in vars(found).values():
            if isinstance(value, ModuleType):
                waiting.append(value)
            else:
                waiting.append(sys.modules.get(str(getattr(value, "__module__", ""))))
    if not files:
        # An installed kernel: its own file says which.
        path = getattr(module, "__file__", None)
        if path is None:
            raise UserError(
                f"--kernel {spec}: there is no file whose hash could identify it.",
                "A kernel is a Python function in a module's file.",
            )
        return sha256_file(path)
    if len(files) == 1:
        return next(iter(files.values()))
    return sha256_bytes(*(f"{name} {files[name]}\n".encode() for name in sorted(files)))


def _is_installed(path: str) -> bool:
    """Whether a file belongs to Python or an installed package: known by its version."""
    places = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    resolved = Path(path).resolve()
    return any(place and resolved.is_relative_to(Path(place).resolve()) for place in places)
