"""A Jinja sandbox in which a template neither goes on without end nor fills the memory.

Knows Jinja's hooks. Does not know what a template is for. What is limited is counted and not timed: whether a row can
be run must not depend on the machine. Nor may what it gives: there is no `random` and no `lipsum`.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

MAX_STEPS = 1_000_000  # of one rendering: rounds of loops, filters and operators
MAX_CHARS = 10_000_000  # of one text, and of all that is written
_MAX_ITEMS = 1_000_000
_MAX_BITS = 10_000
# What a call counts as, and what a result does, beside what made it.
_STEPS_OF_A_CALL = 10
_CHARS_A_STEP, _ITEMS_A_STEP = 1000, 20
# Filters whose numbers are sizes, and filters that make one text of whatever they are given.
_SIZED = {"batch", "center", "indent", "slice", "tojson"}
_TELLING = {"join", "pprint", "string", "tojson"}
# A width that is too large, or not written out: of "%…d" and of "{:…}".
_WIDE = re.compile(r"%[^%a-zA-Z]*(?:\d{7}|\*)"), re.compile(r"[:.][^}]*(?:\d{7}|\{)")


class TooMuchError(Exception):
    """A template goes beyond a limit; the text is what it does."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what a model wrote: the text itself."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        """Return the nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Counting(jinja2.visitor.NodeTransformer):
    """Puts the sandbox between a template and what it has no hook for: loops, `~`, and text written as it stands."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        """Count the rounds of a loop."""
        self.generic_visit(node)
        node.iter = self._call("rounds", node.iter)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        """Count what `~` makes."""
        self.generic_visit(node)
        return self._call("joined", *node.nodes)

    def visit_Output(self, node: jinja2.nodes.Output) -> jinja2.nodes.Node:
        """Count text that stands in the template; `finalize` counts what its expressions give."""
        self.generic_visit(node)
        size = sum(len(part.data) for part in node.nodes if isinstance(part, jinja2.nodes.TemplateData))
        if size:
            node.nodes.append(self._call("wrote", jinja2.nodes.Const(size)))
        return node

    def _call(self, name: str, *args: Any) -> jinja2.nodes.Call:
        function = jinja2.nodes.EnvironmentAttribute(name)
        call = jinja2.nodes.Call(function, list(args), [], None, None)
        return call.set_environment(self._environment)  # type: ignore[return-value]


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Renders templates that cannot do harm. check: is given every value before it is written, and may refuse it."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, check: Callable[[object], object] = lambda value: value, **options: Any) -> None:
        super().__init__(extensions=[jinja2.ext.loopcontrols, _Generation], finalize=self._finalized, **options)
        self._check = check
        self._steps_left = self._chars_left = 0
        del self.filters["random"], self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}

    def rendered(self, template: jinja2.Template, context: dict[str, Any]) -> str:
        """Return the text of a template for what its names are. Raises: TooMuchError, and whatever it does itself."""
        self._steps_left, self._chars_left = MAX_STEPS, MAX_CHARS
        return template.render(context)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_Counting(self).visit(source), *args, **options)

    # what is counted

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise TooMuchError(f"takes more than {MAX_STEPS:,} steps")

    def _counted(self, result: Any, steps: int = 1) -> Any:
        if isinstance(result, (str, bytes)):
            _check_size(len(result))
            steps += len(result) // _CHARS_A_STEP
        elif isinstance(result, (list, tuple, dict, range)):
            _check_size(len(result), _MAX_ITEMS, "list", "items")
            steps += len(result) // _ITEMS_A_STEP
        self._spend(steps)
        return result

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop."""
        for item in items:
            self._spend(1)
            yield item

    def joined(self, *parts: object) -> str:
        """Return the text of `a ~ b`."""
        _check_size(_told_size(parts))
        return str(self._counted("".join(map(str, map(self._check, parts)))))

    def wrote(self, size: int) -> str:
        """Count text that is written; returns none."""
        self._chars_left -= size
        if self._chars_left < 0:
            _check_size(MAX_CHARS + 1)
        return ""

    def _finalized(self, value: object) -> object:
        self.wrote(len(value) if isinstance(value, str) else _told_size([value]))
        return self._check(value)

    # Jinja's hooks

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Return `left operator right`."""
        if operator == "+":
            if isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
                _check_length(left, len(left) + len(right))
        elif operator == "*":
            _check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right, _MAX_BITS, "number", "bits")
        elif operator == "%" and isinstance(left, str):
            _check_widths(left, 0)
        return self._counted(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what a function, a method or a macro gives."""
        owner, values = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None), [*args, *kwargs.values()]
        if isinstance(owner, str):
            _check_growth(owner, __obj.__name__, values)
        if isinstance(owner, (str, int, bytes)) and not __obj.__name__.startswith("format"):
            _check_numbers(values)
        return __self._counted(super().call(__context, __obj, *args, **kwargs), _STEPS_OF_A_CALL)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        place = 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            value, values = args[place], [*args[place + 1 :], *kwargs.values()]
            self._counted(value)
            if name in _SIZED:
                self._spend(_check_numbers(values) // _ITEMS_A_STEP)
            if name == "sum" and any(isinstance(start, (list, tuple)) for start in values):
                raise TooMuchError("adds up lists")
            if isinstance(value, str):
                _check_growth(value, name, values)
            elif name in _TELLING:
                _check_size(_told_size([value, *values]))
            return self._counted(function(*args, **kwargs))

        return filtered


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it, and not Jinja, which escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _check_size(size: int, most: int = MAX_CHARS, what: str = "text", unit: str = "characters") -> None:
    if size > most:
        raise TooMuchError(f"makes a {what} of more than {most:,} {unit}")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_size(left.bit_length() + right.bit_length(), _MAX_BITS, "number", "bits")
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, bytes, list, tuple)) and isinstance(times, int):
            _check_length(many, len(many) * times)


def _check_length(like: str | bytes | list[Any] | tuple[Any, ...], length: int) -> None:
    if isinstance(like, (str, bytes)):
        _check_size(length)
    else:
        _check_size(length, _MAX_ITEMS, "list", "items")


def _check_numbers(values: Iterable[object]) -> int:
    """Return the largest of numbers that are sizes. Raises: TooMuchError if it is too large."""
    most = max((value for value in values if isinstance(value, int)), default=0)
    _check_size(most)
    return max(0, most)


def _check_widths(text: str, kind: int) -> None:
    if _WIDE[kind].search(text):
        raise TooMuchError("formats to a width that is too large, or not written out")


def _check_growth(text: str, name: str, values: Sequence[Any]) -> None:
    """Raises: TooMuchError if a method, or the filter of its name, would make too long a text of `text`."""
    match name, values:
        case (("format" | "format_map"), _):
            for kind in (0, 1):
                _check_widths(text, kind)
            _check_size(_told_size(values))
        case "replace", [str(old), str(new), *_]:
            _check_size(len(text) + text.count(old) * len(new))
        case "join", [list() | tuple() as items]:
            _check_size(_told_size(items) + len(text) * len(items))
        case (("expandtabs" | "indent"), [int() | str() as width, *_]):
            places = text.count("\t") + text.count("\n") + 1
            _check_size(len(text) + places * (len(width) if isinstance(width, str) else width))


def _told_size(values: Iterable[object]) -> int:
    """Return about how many characters the texts of values have; no more is looked at than the limit."""
    size, left = 0, [iter(values)]
    while left and size <= MAX_CHARS:
        value = next(left[-1], left)
        size += 4
        if value is left:
            left.pop()
        elif isinstance(value, (str, bytes)):
            size += len(value)
        elif isinstance(value, (list, tuple)):
            left.append(iter(value))
        elif isinstance(value, dict):
            left.append(itertools.chain.from_iterable(value.items()))
    return size
