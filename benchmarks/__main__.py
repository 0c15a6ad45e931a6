"""The benchmarks: what each measures, its command, and where its figures are.

PYTHONPATH=. .venv/bin/python -m benchmarks                     all of them
PYTHONPATH=. .venv/bin/python -m benchmarks NAME [options]      the command of one, with more options
"""

import shlex
import subprocess
import sys
from typing import NamedTuple

TRL = "system.system_vs_trl"


class Case(NamedTuple):
    """command: of `python -m benchmarks.…`. result: a file of benchmarks/results, with .md and .json; '' if another."""

    name: str
    what: str
    command: str
    result: str


CASES = (
    Case("trl", "samples/s of the whole system against TRL, ragged completions",
         f"{TRL} --dtype bfloat16 float32 --modes 1:1/1 --steps 2 --skip 1", "system_vs_trl_ragged"),
    Case("trl_vllm", "the same against TRL with vLLM as its engine",
         f"{TRL} --rivals vllm --modes 1:1/1 1:1/2 --steps 2 --skip 1", "system_vs_trl_vllm_ragged"),
    Case("trl_vllm_real", "the same with SmolLM2 (`make smollm2`) on the task of make demo-real",
         f"{TRL} --workload real --rivals vllm --modes 1:1/1 --steps 3 --skip 1 --dtype float32 bfloat16",
         "system_vs_trl_vllm_real"),
    Case("trl_real", "the same against TRL's own generate, once",
         f"{TRL} --workload real --modes 1:1/1 --steps 3 --skip 1 --repeats 1 --dtype float32", "system_vs_trl_real"),
    Case("launches", "operations, bytes and products of the learner's step on a card, counted without one",
         "learner.launches", "launches"),
    Case("trl_demo", "seconds of the demo to a held-out accuracy against TRL",
         f"{TRL} --workload demo --modes 0:1/1 1:1/1:continue", "system_vs_trl_demo"),
    Case("ahead", "generation 0, 1 or 2 policy versions ahead of training, on the same two cores",
         f"{TRL} --rivals --modes 0:2/2 1:1/1 2:1/1 --groups 4 --steps 4 --skip 2 --repeats 2 --name async_vs_sync_256",
         "async_vs_sync_256"),
    Case("demo_real", "held-out accuracy of make demo-real by seed; its file says how the runs and a control are made",
         "system.demo_real out/demo-real-seed0 out/demo-real-seed1 out/demo-real-seed2 --control out/control",
         "demo_real"),
    Case("demo_numbers", "the same of make demo-numbers: word problems of one step",
         "system.demo_real out/demo-numbers-seed0 out/demo-numbers-seed1 out/demo-numbers-seed2",
         "demo_numbers"),
    Case("hours", "the seconds of a step that are told before a run, beside those that were measured",
         "system.hours --cpu --runs out/demo-real-seed0 out/demo-real-seed1", "hours"),
    Case("controller", "the controller's CPU time per group, 1 to 256 workers", "system.controller", "controller"),
    Case("chaos", "a run under faults of all kinds, with --keep on a small disk that is filled too",
         "system.chaos --minutes 30 --seed 14", "chaos"),
    Case("chaos_environments", "the same with tools, and environments' processes killed",
         "system.chaos --environments --name chaos_environments", "chaos_environments"),
    Case("chaos_shards", "the same of a whole model in shards over two ranks",
         "system.chaos --minutes 6 --seed 3 --name chaos_shards learner.mode=full memory.layout=sharded "
         "learner.push=adapter", "chaos_shards"),
    Case("chaos_driver", "SIGKILL of the driver, again and again",
         "system.chaos --kinds 'kill driver' --every 8.5 12 --minutes 18 --name chaos_driver rollout.workers=1 "
         "cluster.learners=1", "chaos_driver"),
    Case("lost_node", "what the loss of an emulated node costs a run", "system.lost_node --away 8", "lost_node"),
    Case("hacking_power", "how often a watch suspects honest runs of reward hacking, and how soon it finds exploits",
         "system.hacking_power", "hacking_power"),
    Case("distill", "steps to a held-out accuracy by a teacher and by rewards, on the demo", "system.distill",
         "distill"),
    Case("distill_model", "the same by a teacher that is a model in a process of its own",
         "system.distill --model --rates 1e-4", "distill_model"),
    Case("self_distillation", "SmolLM2 (`make smollm2`) taught by itself behind a privileged prompt",
         "system.self_distillation", "self_distillation"),
    Case("sweep", "seconds of a run's step and memory of several runs side by side", "system.sweep", "sweep"),
    Case("curriculum", "steps to a held-out accuracy with and without data.curriculum, on a pool of which two thirds "
         "teach nothing", "system.curriculum", "curriculum"),
    Case("curriculum_8", "the same with 8 groups a step, as the demo has, and twice the pool",
         "system.curriculum --groups 8 --each 16 --name curriculum_8", "curriculum_8"),
    Case("curriculum_slow", "the first at half the learning rate, so that an epoch is less of the run",
         "system.curriculum --rate 5e-5 --steps 180 --name curriculum_slow", "curriculum_slow"),
    Case("trl_2048", "TRL's own Game2048Env through a run; wants its path",
         "system.foreign_environments --steps 3 trl_2048", "trl_2048"),
    Case("glossary", "verifiers' own glossary through a run; wants an interpreter with it",
         "system.foreign_environments glossary", "verifiers_glossary"),
    Case("agents", "an agent of openai-agents through a run; wants its package on the path",
         "system.foreign_environments agents examples/tiny-tools", "openai_agents"),
    Case("long", "reports of long runs, and the start of one with a million rows", "report long", "long_runs"),
    Case("pictures", "the pictures of docs/report.md, from a run's folder", "report pictures", ""),
    Case("engine_speed", "tokens/s of the engine against bare vLLM and transformers",
         "engine.engine_speed --groups 4 --repeats 3", "engine_speed"),
    Case("engine_speed_smollm2", "the same with SmolLM2 (`make smollm2`) against vLLM without LoRA",
         "engine.engine_speed --sides 'vllm base' --model build/smollm2/bfloat16 --dtype bfloat16 --rank 32 --groups 4 "
         "--max-tokens 96 --repeats 7 --name engine_speed_smollm2_bfloat16", "engine_speed_smollm2_bfloat16"),
    Case("engine_parts", "where a step of the generator's engine spends its time on a CPU", "engine.engine_parts",
         "engine_parts"),
    Case("push", "a policy's way in whole runs, by part, adapter and merged weights", "engine.push runs", "push"),
    Case("whole_push", "whole weights within one machine", "engine.push whole", "whole_push"),
    Case("whole_push_shards", "the same to a generator of two processes", "engine.push whole --shards 2",
         "whole_push_2_shards"),
    Case("fan_out", "a large adapter to the generators of one node", "engine.push fan_out", "fan_out"),
    Case("delivery_power", "how soon a policy that did not arrive is noticed", "engine.delivery_power",
         "delivery_power"),
    Case("learner_step", "memory and CPU time of one optimizer step against TRL", "learner.learner_step --repeats 2",
         "learner_step"),
    Case("real_step", "a step on SmolLM2, packed, in rows, and by transformers", "learner.real_step", "real_step"),
    Case("cpu_step", "where a step of the learner spends its time on a CPU", "learner.cpu_step", "cpu_step"),
    Case("hybrid_step", "a step on Qwen3.5 and gpt-oss shapes, packed against padded", "learner.hybrid_step",
         "hybrid_step"),
    Case("ranks", "speed and memory of two ranks of the learner", "learner.ranks", "ranks"),
    Case("families", "sampler against learner, token by token, of each model family", "learner.model_families",
         "model_families"),
    Case("experts", "what twenty steps gain with adapters of attention and experts, three seeds",
         "learner.model_families --experts", "expert_adapters"),
    Case("routing", "how far sampler and learner are apart with and without routing replay",
         "learner.model_families --routing", "routing_replay"),
    Case("shared_base", "one base for both roles against two, to the bit, of each model family",
         "learner.model_families --shared-base", ""),
    Case("memory_table", "the learner's peak for every model of the table", "learner.memory_tables peaks",
         "memory_table"),
    Case("published_memory", "the plan beside what others have published", "learner.memory_tables published",
         "published_memory"),
    Case("four_roles", "PPO's four roles on one card, by the plan", "learner.memory_tables four_roles", ""),
    Case("gpu_smoke", "the first ten minutes on a card (`make smoke`)", "gpu.smoke", "gpu_h200"),
    Case("gpu_card", "where a card's seconds go, in order of value (`make card`)", "gpu.card", ""),
    Case("gpu_learner", "the learner's memory and speed on a card, TRL's step beside it", "gpu.learner", "gpu_h100"),
    Case("gpu_system", "the whole system on a card", "gpu.system", "gpu_h200"),
    Case("gpu_ranks", "two ranks of the learner on one card", "learner.ranks --device cuda", "gpu_h200"),
)  # fmt: skip


def main() -> int:
    if not sys.argv[1:]:
        for case in CASES:
            print(f"{case.name:22}{case.what}\n{'':22}python -m benchmarks.{case.command}")
            print(f"{'':22}benchmarks/results/{case.result}.md\n" if case.result else "")
        return 0
    name, *options = sys.argv[1:]
    if (found := next((case for case in CASES if case.name == name), None)) is None:
        print(f"{name}: must be one of {', '.join(case.name for case in CASES)}", file=sys.stderr)
        return 2
    module, *words = shlex.split(found.command)
    return subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *words, *options], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
