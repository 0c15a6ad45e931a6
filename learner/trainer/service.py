"""What may be asked of the learner's process: the methods that cluster.actor.Actor.call takes at that border.

Imports no torch, so that the driver reads it.
"""

from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa

from cluster.actor import Shared, stays_there
from cluster.files import Digest
from rollout.delivery import Answer
from rollout.types import Manifest, PolicyId, SentPolicy, WeightsInFile


class Arithmetic(NamedTuple):
    """What the last bits of a step depend on, beside its settings and its rollouts.

    torch: its version. device: the processor's or the card's name. threads: that compute on a CPU. products: the
    library of float32 matrix products on a CPU (learner.trainer.float32_products), default or oneDNN.
    """

    torch: str
    device: str
    threads: int
    products: str


class Exported(NamedTuple):
    """What there is to say of a policy that goes out. seconds: that it took to build."""

    policy_id: PolicyId
    seconds: float


class TrainerService(Protocol):
    """learner.trainer.trainer.Trainer is the one that trains."""

    async def step(self, groups: list[pa.Table]) -> dict[str, float]:
        """Learns from the groups (tables of rollout.schema); the version grows by one, whatever happens.

        It is one optimizer step, or learner.updates_per_batch of them, each on its share of the groups; loss/total and
        loss/grad_norm are then means over them, loss/skipped_nonfinite their number. Samples without a reward are not
        trained. Completions of groups without signal (all rewards equal) have gradient 0 unless beta > 0 and are
        skipped without a change of the loss's denominators; if nothing is left, loss/trained_tokens is 0, the weights
        stay and there is no policy/ metric.

        Returns:
            Metrics by name. policy/ ones are means or maxima over the trained tokens, mismatch_max_current over those
            sampled by the present version, in nats; time/train in seconds; memory/learner_peak in bytes: on CUDA the
            allocator's peak in this step, on CPU the highest resident set of the whole process since its start, without
            a base that is mapped; memory/oom_retries counts how often this step was taken again with half the token
            budget.

        Raises:
            ValueError: the groups are malformed or have token ids beyond the vocabulary.
            OutOfMemory: a micro-batch of one completion does not fit, or memory_bytes was exceeded on a CPU.
            RuntimeError: loss or gradient was not finite in three steps in a row.
        """

    async def mismatch(self) -> pa.Array:
        """Of the newest step, for people who look at the run: a list for each row of its groups, by how many nats the
        logprob of each token with the policy that the step began with is above the sampler's. nan: the policy did not
        sample the token. null: the row was not trained on, and its logprobs were not computed."""

    async def score(self, groups: list[pa.Table]) -> list[list[float]]:
        """What each reward model on the base (`rewards` with `use: adapter:...`) says of each row of the groups, in
        their order; not finite where its hidden states are not. Prompt and completion are read as they are, special
        tokens included, and the last token that is not padding counts, as in transformers' sequence classification.

        Raises:
            ValueError, OutOfMemory: as `step`.
        """

    async def rehearse(self, prompt_length: int) -> dict[str, float]:
        """The most that a step can ask for, once, and nothing of it kept: a micro-batch as large as the token budget
        allows, of prompts of that length with completions of the greatest, forward and backward, beside room for the
        optimizer's states. So a run that does not fit says so before its first step, not at its longest sample.

        Returns:
            memory/learner_peak in bytes, memory/oom_retries and memory/token_budget.

        Raises:
            OutOfMemory: a single completion of the greatest length does not fit.
        """

    @stays_there
    async def outgoing(self, stays: bool = False) -> tuple[Shared[SentPolicy], Exported]:
        """The present policy, for the generators: it goes to them from here, not by way of the driver.

        The adapter, or weights with learner.push merged or learner.mode full (learner.model.export.update_of).

        stays: whole weights stay in this process's memory, and what goes out is where they lie (rollout.weights);
        all generators must be on this machine.
        """

    async def empty_weights(self) -> WeightsInFile:
        """As those of `outgoing` with `stays`, without a tensor: what generators try to map."""

    async def probe(self, token_ids: list[int]) -> Answer:
        """What the present policy says of the tokens, and what a generator that has it holds.

        [len - 1] float32, nats: logprob of token i + 1 given tokens <= i, temperature 1.

        Raises:
            ValueError: fewer than two tokens, or an id beyond the vocabulary.
        """

    async def arithmetic(self) -> Arithmetic:
        """With what this process computes."""

    async def detach_base(self) -> None:
        """Lets go of the generator's base (memory.layout: shared), after the work that is under way; until attach_base,
        what computes with it waits."""

    async def attach_base(self, manifest: Manifest) -> None:
        """Takes the base of the generator that has come in the place of the one before.

        Raises:
            WrongInput: it is another base, or cannot be mapped.
        """

    async def release_cache(self) -> None:
        """Between two steps the device's free memory is others' (memory.layout: alternating)."""

    async def pulse(self) -> float:
        """A number that grows as long as a step gets on: micro-batches so far, and on a CPU, where one takes long,
        seconds of computation (a thread that waits for a CUDA device computes, so there they would say nothing), and
        seconds in which it waits for a generator to bring the base."""

    async def sees(self, file: Path) -> bool:
        """Whether this process finds a file that another has made: on another node it may see another disk."""

    async def save(self, folder: Path) -> dict[str, Digest]:
        """Everything that `load` needs to go on bit for bit, and what is published: the adapter in PEFT's format, or
        the whole model in `model/`. The folder is made.

        Returns what was written, by path in the folder, so that the driver can tell whether it sees the same. Raises
        WriteFailed if it cannot be written.
        """

    async def load(self, folder: Path) -> None:
        """What `save` wrote, random number generators included.

        Raises:
            ValueError: the adapter is not one of this model and learner.lora.
            FileNotFoundError: the folder is not a checkpoint.
        """
