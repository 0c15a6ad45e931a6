"""The interface of the learner's process: the methods that the driver calls by way of cluster.actor.Actor.call.

It imports no torch, since the driver imports it.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from cluster.actor import Shared, stays_there
from cluster.files import Digest
from rollout.delivery import Answer
from rollout.types import Manifest, PolicyId, SentPolicy, WeightsInFile


class Arithmetic(NamedTuple):
    """The software and hardware that a step is computed with. The last bits of its result depend on them, besides its
    settings and its rollouts.

    torch: version of torch.
    device: name of the processor or the card.
    threads: number of threads that compute on a CPU.
    products: the library of float32 matrix products on a CPU (learner.trainer.float32_products), default or oneDNN.
    """

    torch: str
    device: str
    threads: int
    products: str


class Exported(NamedTuple):
    """The identity of a policy that is sent to the generators, and the seconds that building its payload took."""

    policy_id: PolicyId
    seconds: float


class TrainerService(Protocol):
    """What a learner's process offers. learner.trainer.trainer.Trainer implements it for a learner of one process."""

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        """Learns from the groups (tables of rollout.schema). The policy version grows by one even if nothing was
        learned.

        A step is one optimizer step, or learner.updates_per_batch of them, each on its share of the groups; loss/total
        and loss/grad_norm are then means over the optimizer steps. Completions without a reward are not trained on.
        Completions of groups without signal (all rewards equal) have gradient 0 unless beta > 0, and are skipped
        without a change of the loss's denominators; if nothing is left, loss/trained_tokens is 0, the weights stay as
        they are, and there is no policy/ metric.

        Returns:
            Metrics by name. policy/ metrics are means or maxima over the trained tokens; mismatch_max_current is over
            the tokens that the present version sampled, in nats. loss/skipped_nonfinite is the number of optimizer
            steps that were skipped. time/train is in seconds. memory/learner_peak is in bytes: on CUDA the allocator's
            peak in this step, on a CPU the highest resident set of the process since its start, without a mapped base.
            memory/oom_retries is how often the token budget was lowered in this step, and a pass computed again.

        Raises:
            ValueError: the groups are malformed or have token ids beyond the vocabulary.
            OutOfMemory: a micro-batch of one completion does not fit, or the learner's memory limit was exceeded.
            RuntimeError: loss or gradient was not finite in three steps in a row.
        """

    async def mismatch(self) -> pa.Array:
        """Returns the mismatch of the newest step's tokens, for people who look at the run: a list for each row of its
        groups. A number is the token's logprob under the policy that the step began with minus the sampler's, in nats;
        nan: the policy did not sample the token. A row that was not trained on is null instead of a list."""

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        """Returns for each reward model on the base (`rewards` with `use: adapter:...`) its score of each row of the
        groups, in their order. A score is not finite where the hidden states are not. Prompt and completion are read
        with their special tokens, and the score is that of the last token that is not padding, as in transformers'
        sequence classification.

        Raises:
            ValueError, OutOfMemory: see `step`.
        """

    async def rehearse(self, prompt_length: int, teacher_length: int = 0) -> dict[str, float]:
        """Computes once the largest micro-batch that a step can have, and keeps nothing of it.

        The micro-batch is as large as the token budget allows, of prompts of `prompt_length` tokens with completions of
        the greatest length. It runs forward and backward, with memory allocated for the optimizer's states. So a run
        that does not fit fails before its first step, not at its longest completion.

        teacher_length: tokens of a teacher's prompts (data.teacher), whose largest micro-batch runs forward, too; 0:
            there are none.

        Returns:
            memory/learner_peak in bytes, memory/oom_retries and memory/token_budget.

        Raises:
            OutOfMemory: a single completion of the greatest length does not fit.
        """

    @stays_there
    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        """Returns the present policy for the generators: the adapter, or whole weights with learner.push merged or
        learner.mode full (learner.model.export.update_of). The driver gets a handle; generators read the payload from
        this node.

        stays: whole weights stay in this process's memory, and the payload says where they lie (rollout.weights); all
        generators must be on this machine.
        """

    async def empty_weights(self) -> WeightsInFile:
        """Returns a payload as that of `outgoing` with `stays`, but without tensors: a trial whether generators can map
        this process's memory."""

    async def probe(self, token_ids: list[int]) -> Answer:
        """Returns the answer that a generator with the present policy must give to a probe of these tokens: the digests
        of its tensors, and [len - 1] float32 nats, the logprob of token i + 1 given tokens <= i at temperature 1.

        Raises:
            ValueError: fewer than two tokens, or an id beyond the vocabulary.
        """

    async def arithmetic(self) -> Arithmetic:
        """Returns the software and hardware with which this process computes."""

    async def detach_base(self) -> None:
        """Unmaps the generator's base (memory.layout: shared) after the work that is under way. Work that computes with
        the base waits until `attach_base` is called."""

    async def attach_base(self, manifest: Manifest) -> None:
        """Maps the base of the generator that has replaced the previous one.

        Raises:
            WrongInput: it is another base, or cannot be mapped.
        """

    async def release_cache(self) -> None:
        """Gives the allocator's unused memory back to the device, which the generator uses between two steps
        (memory.layout: alternating)."""

    async def pulse(self) -> float:
        """Returns a number that grows as long as a step makes progress: the micro-batches so far, plus the seconds of
        waiting for a generator's base, plus on a CPU, where a micro-batch takes long, the CPU seconds of the work."""

    async def sees(self, file: Path) -> bool:
        """Whether this process finds a file that another process has made: on another node it may see another disk."""

    async def save(self, folder: Path) -> dict[str, Digest]:
        """Writes a checkpoint into the folder, which it creates: all that `load` needs to go on bit for bit, and the
        adapter in PEFT's format, or the whole model in `model/`, for users.

        Returns the digests of the files by path in the folder, with which the driver checks that it sees the same
        files. Raises WriteFailed if the checkpoint cannot be written.
        """

    async def load(self, folder: Path) -> None:
        """Restores what `save` wrote, including the states of the random number generators.

        Raises:
            ValueError: the adapter is not one of this model and learner.lora.
            FileNotFoundError: the folder is not a checkpoint.
        """
