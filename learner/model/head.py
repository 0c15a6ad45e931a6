"""The output embedding in its operations (learner.model.logprob), whole on one rank or in shards over several."""

from collections.abc import Callable
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor, nn

P = ParamSpec("P")
T = TypeVar("T")

GATHERED = "gathered"  # name of the method that a head in shards gets


def with_head(
    lm: Any, operation: Callable[Concatenate[Tensor, Tensor, P], T], hidden: Tensor, *args: P.args, **kwargs: P.kwargs
) -> T:
    """operation(hidden, head, ...), head [V, H]. Of a base in shards (learner.model.sharded_base) it is gathered for
    the operation, and if it is trained once more for the backward pass; all ranks must be in both."""
    module = lm.get_output_embeddings()
    gathered = getattr(module, GATHERED, None)
    if gathered is None:
        return operation(hidden, module.weight, *args, **kwargs)
    answer: T = gathered(operation, hidden, *args, **kwargs)
    return answer


def gather_in_operations(head: nn.Module) -> None:
    """For a head that FSDP2 has divided: its hooks are at the module's methods, not at uses of its weight."""
    from torch.distributed.fsdp import register_fsdp_forward_method  # here: slow to import, and few runs use it

    def gathered(module: Any, operation: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return operation(hidden, module.weight, *args, **kwargs)

    setattr(head, GATHERED, MethodType(gathered, head))
    register_fsdp_forward_method(head, GATHERED)


def begin_anew(lm: Any) -> None:
    """After a pass that failed half-way: of a base in shards, what is gathered is let go, and FSDP2 forgets the pass.
    Else its outermost modules would sum no gradients any more."""
    for module in (lm.base_model, lm.get_output_embeddings()):
        if hasattr(module, "reset_iter_state"):
            module.reset_iter_state()


def check_ids(head: Tensor, highest: int) -> None:
    """Raises ValueError if a token id is beyond the vocabulary of that head, [V, H]."""
    if highest >= len(head):
        raise ValueError(
            f"token ids: must be below the vocabulary of model.path, {len(head)}, got {highest}; the rollouts were "
            "made with another tokenizer or model"
        )
