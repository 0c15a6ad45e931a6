"""What ends every --help: examples to copy, and the exit codes."""


def epilog(*examples: str, failed: str = "it failed") -> str:
    """`failed`: what exit code 1 means. The \\b keeps the line breaks."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}\n\nExit codes: 0 done, 1 {failed}, 2 the input is wrong."
