"""A wrong command line in one sentence, as every error of gleaner: field, rule, value, next step."""

import typer


def sentence(error: typer.TyperException) -> str:
    """What is wrong, without the usage around it."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    text = " ".join(error.message.split()).removeprefix("Value error, ").rstrip(".")
    if param is not None:
        name = max(param.opts, key=len) if param.param_type_name == "option" else param.display_name_raw
        return f"{name}: {text[:1].lower()}{text[1:]}" if text else f"{name}: required, but not given"
    where = "gleaner" if ctx is None else ctx.command_path
    near = getattr(error, "possibilities", None) or ()
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{where}: {text}{hint}"
