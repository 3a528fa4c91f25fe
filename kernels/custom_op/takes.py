"""What a fast path reads as it is given: shapes, dtypes and layout of its arguments, in one line of text.

    takes("x: T [..., K]; weight: T [N, K] rows; bias: T [N]?; K % 16 == 0", T=(torch.bfloat16, torch.float32))

argument: what it is   separated by semicolons; `weight.data` is a field of the argument `weight`, and behind `?` stands
                       what may be None
dtype                  a dtype's name, several of them as `int32|int64`, `any`, or a name that stands for one of the
                       dtypes it is given, the same one everywhere
[sizes]                a name is any size, the same one everywhere; a number or an expression of names that came before
                       is that size; `...` any number of dimensions, `*B` the same ones everywhere. No brackets: any
rows                   the last dimension lies side by side
contiguous             the whole does
written                it is written to: contiguous, and no memory of another argument's
value                  no tensor, but what conditions ask for
a condition            without a colon: an expression of names and arguments

The line is parsed once, and becomes a Python function of comparisons. A pointer that C++ or Triton gets knows neither
where its memory ends nor what a view has promised (a negative bit, no memory at all): whatever the function does not
name as fitting goes to the definition. It computes the result or raises as torch does.
"""

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

_ARGUMENT = re.compile(
    r"(?P<name>\w+(\.\w+)?):\s*(?P<dtype>[\w|]+)\s*(\[(?P<sizes>.*)\])?(?P<flags>[\s\w]*)(?P<none>\?)?$"
)
FLOATS = "bfloat16|float16|float32"
"""The dtypes that a Triton kernel reads and writes as its definition does: of float64 that computes more digits."""
INTEGERS = "int32|int64"
_FLAGS = {"rows", "contiguous", "written"}
_PLAIN = (Tensor, nn.Parameter)


class Takes:
    """A description of arguments, and the functions that are made of it.

    misfit, misfit_on_cpu, misfit_of_fakes: called with the arguments in the order in which the text names them; return
    the name of the first one that does not fit, or of a condition "arguments", and "" where all fit. `misfit` compares
    sizes, dtypes, devices and layout, as can be traced; `misfit_on_cpu` also wants plain tensors in a CPU's memory,
    whose address says what they hold; `misfit_of_fakes` names what is known to be wrong whatever a variable size is.
    """

    def __init__(self, text: str, **names: Any) -> None:
        self.text = " ".join(text.split())
        items = [item.strip() for item in self.text.split(";")]
        parsed = [(item, _ARGUMENT.match(item)) for item in items]
        self.names = tuple(dict.fromkeys(found["name"].partition(".")[0] for _, found in parsed if found))
        self._texts = {found["name"]: item for item, found in parsed if found}
        self._tensors = [found["name"] for _, found in parsed if found and found["dtype"] != "value"]
        self.misfit, self.misfit_on_cpu, self.misfit_of_fakes = (
            _compiled(parsed, self.names, names, where) for where in ("anywhere", "cpu", "fake")
        )

    def fitting(self, function: Callable, *, on_cpu: bool = False) -> Callable[..., bool]:
        """Return a function of the arguments of another one, with its name and defaults; the result says whether they
        fit.

        on_cpu: and whether no gradient is wanted of a tensor behind the first. Made of text, so that a call is one
        call, and the compiler traces one line.
        """
        parameters = inspect.signature(function).parameters.values()
        constants = {f"_{p.name}": p.default for p in parameters if p.default is not p.empty}
        constants |= {"misfit": self.misfit_on_cpu if on_cpu else self.misfit, "gradients": torch.is_grad_enabled}
        written = [p.name if p.default is p.empty else f"{p.name}=_{p.name}" for p in parameters]
        keyword_only = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
        if keyword_only:
            written.insert(keyword_only[0], "*")
        wanted = [f"({x} is not None and {x}.requires_grad)" for x in self._tensors[1:] if on_cpu]
        plain = f" and not (gradients() and ({' or '.join(wanted)}))" if wanted else ""
        body = f"return not misfit({', '.join(self.names)}){plain}"
        text = (
            f"def make({', '.join(constants)}):\n    def fits({', '.join(written)}):\n        {body}\n    return fits\n"
        )
        return _made(text, constants, f"takes of {function.__name__}")

    def check(self, operation: str, *arguments: Any) -> None:
        """Raise ValueError, in one sentence, where an argument does not fit."""
        wrong = self.misfit(*arguments)
        if wrong:
            raise ValueError(self.sentence(operation, wrong, *arguments))

    def check_on_cpu(self, operation: str, *arguments: Any) -> None:
        """As `check`, of plain tensors in a CPU's memory."""
        wrong = self.misfit_on_cpu(*arguments)
        if wrong:
            raise ValueError(self.sentence(operation, wrong, *arguments))

    def sentence(self, operation: str, wrong: str, *arguments: Any) -> str:
        """Say what is wrong with the argument of this name, and what is allowed."""
        values = dict(zip(self.names, arguments, strict=True))
        if wrong not in self._texts:
            all_of_them = ", ".join(f"{name} {_brief(value)}" for name, value in values.items() if value is not None)
            return f"{operation} was called with {all_of_them}; allowed: {self.text}"
        root, _, field = wrong.partition(".")
        value = getattr(values[root], field) if field else values[root]
        others = ", ".join(
            f"{name} {_brief(other)}" for name, other in values.items() if isinstance(other, Tensor) and name != root
        )
        beside = f" beside {others}" if others else ""
        return (
            f"{operation}: {wrong} is {_brief(value)}{beside}; allowed: {self._texts[wrong].partition(':')[2].strip()}"
        )


def takes(text: str, **names: Any) -> Takes:
    """Return the description that a text is of. names: what stands for several dtypes, and what conditions use.

    ValueError for a text that does not parse."""
    return Takes(text, **names)


def expands(x: Tensor, shape: Sequence[int]) -> bool:
    """Whether x is broadcast to a shape, and not the other way round as well."""
    return x.dim() <= len(shape) and all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(shape)))


def apart(written: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether no memory of contiguous tensors that are written to is another's, or one of the others'."""
    spans = sorted(map(_span, written))
    for (_, end), (begin, _) in itertools.pairwise(spans):
        if end > begin:
            return False
    for begin, stop in map(_span, others):
        for start, end in spans:
            if end > begin and start < stop:
                return False
    return True


def _span(x: Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor begins and ends."""
    begin = x.data_ptr()
    if x.is_contiguous():  # for one without elements, too
        return begin, begin + x.nbytes
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (last + 1) * x.element_size()


def _compiled(
    parsed: Sequence[tuple[str, re.Match | None]], parameters: Sequence[str], names: dict[str, Any], where: str
) -> Any:
    """Return the function of these items: compiled from text, so that a call is comparisons and nothing else."""
    constants = {"_Tensor": Tensor, "_plain": _PLAIN, "_strided": torch.strided, "_apart": apart, "_differ": _differ}
    constants |= names
    lines: list[str] = []
    known: set[str] = set()
    tensors = [found["name"] for _, found in parsed if found is not None and found["dtype"] != "value"]
    written = [found["name"] for _, found in parsed if found is not None and "written" in found["flags"].split()]
    if where == "fake":
        optional = {found["name"] for _, found in parsed if found and found["none"]}
        fixed = [f"all(type(n) is int for n in {name}.shape)" for name in tensors]
        fixed = [f"({x} is None or {y})" if x in optional else y for x, y in zip(tensors, fixed, strict=True)]
        lines.append(f"_fixed = {' and '.join(fixed) or True}")
    for item, found in parsed:
        if found is None:
            lines.append(f"if {'_fixed and ' * (where == 'fake')}not ({item}): return 'arguments'")
        elif found["dtype"] != "value":
            before = set(known)
            own = list(_comparisons(found, known, constants, where, tensors[0]))
            if found["none"] and known != before:
                raise ValueError(f"{item} may be None and is the first to name {', '.join(sorted(known - before))}")
            lines += [f"if {found['name']} is not None:", *(f"    {x}" for x in own)] if found["none"] else own
    if written and where == "cpu":
        others = "".join(f"*(() if {name} is None else ({name},)), " for name in tensors if name not in written)
        lines.append(f"if not _apart(({', '.join(written)},), ({others})): return 'arguments'")
    body = "\n".join(f"        {line}" for line in [*lines, "return ''"])
    text = f"def make({', '.join(constants)}):\n    def misfit({', '.join(parameters)}):\n{body}\n    return misfit\n"
    return _made(text, constants, f"takes {'; '.join(item for item, _ in parsed)}")


def _made(text: str, constants: Mapping[str, Any], name: str) -> Any:
    """Return what the text's `make` builds from constants; the compiler then finds them in a closure."""
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, f"<{name}>", "exec"), scope)
    return scope["make"](**constants)


def _differ(one: Any, other: Any) -> bool:
    """Whether two sizes are known to be different."""
    if isinstance(one, tuple):
        return len(one) != len(other) or any(_differ(*pair) for pair in zip(one, other, strict=True))
    return one != other if type(one) is int and type(other) is int else statically_known_true(one != other)


def _comparisons(found: re.Match, known: set[str], constants: dict[str, Any], where: str, first: str) -> Iterator[str]:
    """Yield the lines that compare one argument. known: names of sizes and dtypes that have a value by then."""
    name = found["name"]
    wrong = f"return {name!r}"
    if where == "cpu":
        yield (
            f"if type({name}) not in _plain or not {name}.is_cpu or {name}.layout is not _strided or {name}.is_neg() "
            f"or {name}._is_zerotensor(): {wrong}"
        )
    else:
        yield f"if not isinstance({name}, _Tensor): {wrong}"
        if name != first:
            yield f"if {name}.device != {first}.device: {wrong}"
    yield from _dtype(found["dtype"], name, known, constants, wrong)
    flags = set(found["flags"].split())
    if not flags <= _FLAGS:
        wrongs, allowed = ", ".join(sorted(flags - _FLAGS)), ", ".join(sorted(_FLAGS))
        raise ValueError(f"{name} has the flags {wrongs}; allowed: {allowed}")
    if found["sizes"] is not None:
        sizes = [size.strip() for size in found["sizes"].split(",") if size.strip()]
        differ = "({0} != {1} if _fixed else _differ({0}, {1}))" if where == "fake" else "{} != {}"
        yield from _sizes(sizes, name, known, wrong, differ)
    if where != "fake":
        if "rows" in flags:
            yield f"if {name}.stride(-1) != 1 and {name}.shape[-1] > 1: {wrong}"
        if flags & {"contiguous", "written"}:
            yield f"if not {name}.is_contiguous(): {wrong}"


def _dtype(dtype: str, name: str, known: set[str], constants: dict[str, Any], wrong: str) -> Iterator[str]:
    if dtype == "any":
        return
    if dtype in constants:
        if f"dtype {dtype}" in known:
            yield f"if {name}.dtype != _{dtype}: {wrong}"
        else:
            known.add(f"dtype {dtype}")
            yield f"if {name}.dtype not in {dtype}: {wrong}"
            yield f"_{dtype} = {name}.dtype"
        return
    allowed = tuple(getattr(torch, each) for each in dtype.split("|"))
    constants[f"_{dtype.replace('|', '_or_')}"] = allowed
    yield f"if {name}.dtype not in _{dtype.replace('|', '_or_')}: {wrong}"


def _sizes(sizes: Sequence[str], name: str, known: set[str], wrong: str, differ: str) -> Iterator[str]:
    """Yield the lines that compare the sizes: those behind `...` are counted from the end."""
    some = [i for i, size in enumerate(sizes) if size == "..." or size.startswith("*")]
    if len(some) > 1:
        raise ValueError(f"{name} has {len(some)} parts of any number of dimensions; allowed: one")
    yield f"_s = {name}.shape"
    yield f"if len(_s) {'<' if some else '!='} {len(sizes) - len(some)}: {wrong}"
    for i, size in enumerate(sizes):
        if size in ("...", "_"):
            continue
        at = f"_s[{i if not some or i < some[0] else i - len(sizes)}]"
        if size.startswith("*"):
            size, behind = size[1:], i + 1 - len(sizes)
            at = f"_s[{i}:{behind or ''}]"
        if size.isidentifier() and size not in known:
            known.add(size)
            yield f"{size} = {at}"
        else:
            yield f"if {differ.format(at, size)}: {wrong}"


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{value.dtype} {tuple(value.shape)}{device}"
    return str(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
