"""A calculator as a tool. What it cannot compute it says in its answer, so that the policy can try again."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # characters of an expression
MOST_BITS = 4096  # of any number on the way: 1,233 digits
_WRITTEN = re.compile(r"[\d\s.+\-*/()]+", re.ASCII)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_USAGE = "write numbers with + - * / ** and parentheses, for example (3 + 4) * 2"


def calculator(expression: str) -> str:
    """Computes an arithmetic expression exactly.

    Args:
        expression: numbers with + - * / ** and parentheses, for example (3 + 4) * 2

    Returns:
        the result, in 12 digits where it is no whole number; or a line that begins with "error:"
    """
    if len(expression) > LONGEST:
        return f"error: an expression may have {LONGEST} characters, this one has {len(expression)}"
    if not _WRITTEN.fullmatch(expression):
        return f"error: {_USAGE}"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"
    except (SyntaxError, ValueError):  # ValueError: no such operator; a float without end
        return f"error: {_USAGE}"
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: the result is too large"
    except ArithmeticError as refused:  # that of _power
        return f"error: {refused}"


def _value(node: ast.expr) -> Fraction:
    """Fractions, since 0.1 + 0.2 is 0.3."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return _value(inner)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _bounded(_OPERATORS[type(sign)](_value(left), _value(right)))
    raise ValueError(_USAGE)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticError("an exponent must be a whole number")
    if abs(exponent.numerator) * max(_bits(base) - 1, 0) > MOST_BITS:  # before it is computed: 9**9**9 takes hours
        raise OverflowError
    return Fraction(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MOST_BITS:
        raise OverflowError
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
