"""Which classes the untyped objects are that our code gets from vLLM, Ray and bitsandbytes.

A path is a name as the code has it, with `[]` for an item and `()` for what a call returns. More than one class: it may
be any of them, so each must have what is used. PLAIN: a container, a number, a tensor, or an object of ours.
"""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

PLAIN: tuple[str, ...] = ()

# On CUDA vLLM takes its second model runner where it can, on a CPU the first.
_RUNNERS = ("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "vllm.v1.worker.gpu_model_runner.GPUModelRunner")
_FOUND = "vllm.entrypoints.generate.base.protocol"  # of what a tool parser finds
_MOE, _METHOD = "vllm.model_executor.layers.fused_moe", "UnquantizedFusedMoEMethod"
_GATED_DELTA = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"
_QUANT_STATE = "bitsandbytes.functional.QuantState"
_OPTIMIZERS = ("bitsandbytes.optim.adamw.AdamW8bit", "bitsandbytes.optim.adamw.PagedAdamW8bit")

OBJECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "rollout/vllm/": {
        "caches": ("vllm.v1.kv_cache_interface.KVCacheConfig",),
        "engine": ("vllm.v1.engine.llm_engine.LLMEngine",),
        "engine.engine_core": ("vllm.v1.engine.core_client.InprocClient",),
        "engine.vllm_config": ("vllm.config.VllmConfig",),
        "engine.vllm_config.model_config": ("vllm.config.ModelConfig",),
        "engine.vllm_config.device_config": ("vllm.config.DeviceConfig",),
        "engine.output_processor": ("vllm.v1.engine.output_processor.OutputProcessor",),
        "parents": PLAIN,
        "parent": ("vllm.v1.engine.parallel_sampling.ParentRequest",),
        "output": ("vllm.outputs.RequestOutput",),
        "part": ("vllm.outputs.CompletionOutput",),
        "span": ("vllm.outputs.WeightVersionSpan",),
        "logprobs": ("vllm.logprobs.FlatLogprobs",),
        "worker": ("vllm.v1.worker.gpu_worker.Worker",),
        "worker.model_runner": _RUNNERS,
        "worker.model_runner.lora_manager": ("vllm.lora.worker_manager.LRUCacheWorkerLoRAManager",),
        "manager": ("vllm.lora.model_manager.LRUCacheLoRAModelManager",),
        "manager.lora_index_to_id": PLAIN,
        "manager.modules": PLAIN,
        "manager.packed_modules": PLAIN,
        "layer": ("vllm.lora.layers.base_linear.BaseLinearLayerWithLoRA",),
        "layer.base_layer": ("vllm.model_executor.layers.linear.ColumnParallelLinear",),
        # One of many: what each of vLLM's plain transformers has.
        "model": ("vllm.model_executor.models.llama.LlamaForCausalLM",),
        "model.model": ("vllm.model_executor.models.llama.LlamaModel",),
        "model.model.embed_tokens": PLAIN,
        "model.config": PLAIN,
        "model.packed_modules_mapping": PLAIN,
        "mapper": ("vllm.model_executor.models.utils.WeightsMapper",),
        "renames": ("vllm.model_executor.models.utils.WeightsMapper",),
        "module": ("vllm.model_executor.layers.linear.LinearBase",),
        "head": ("vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead",),
        "embedding": ("vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding",),
        "vocabulary": ("vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbeddingShardIndices",),
        "divided": (
            "vllm.model_executor.layers.linear.ColumnParallelLinear",
            "vllm.model_executor.layers.linear.RowParallelLinear",
        ),
        "ModelRegistry.models": PLAIN,
        **dict.fromkeys(
            ("a[]", "b[]", "stack", "weight", "parts", "module.bias", "module.weight", "head.weight"), PLAIN
        ),
    },
    "rollout/vllm/cpu.py": {
        "holder": PLAIN,
        "wrapper": ("vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU",),
        "method": ("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",),
        "part": PLAIN,
        **dict.fromkeys(("norm", "norm_of_sum"), ("vllm.ir.op.IrOp",)),
        **dict.fromkeys(("sampler", "self"), ("vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler",)),
        **dict.fromkeys(("kept", "logprobs"), PLAIN),
        "kernel": ("vllm.model_executor.kernels.linear.mixed_precision.cpu.CPUWNA16LinearKernel",),
        "kernel.config": ("vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel.MPLinearLayerConfig",),
        **dict.fromkeys(("kind", "kernel.config.weight_type"), ("vllm.scalar_type.ScalarType",)),
        **dict.fromkeys(("packed", "zeros", "scales"), PLAIN),  # parameters, whose order vLLM sets as attributes
        **dict.fromkeys(("numbers", "steps", "middle", "grouped", "layer", "unpack", "scales.data"), PLAIN),
    },
    "rollout/vllm/gated_delta.py": {
        "home": ("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention",),
        "context": ("vllm.forward_context.ForwardContext",),
        "batch": ("vllm.v1.attention.backends.gdn_attn.GDNAttentionMetadata",),
        "layer": (_GATED_DELTA,),
        "layer.conv1d": ("vllm.model_executor.layers.linear.ColumnParallelLinear",),
        **dict.fromkeys(
            (
                "batch.non_spec_query_start_loc",
                "memory",
                "memory[]",
                "part",
                "value",
                "query",
                "layer.A_log",
                "layer.A_log.float()",
            ),
            PLAIN,
        ),
    },
    "rollout/vllm/text_view.py": {
        "vllm_config": ("vllm.config.VllmConfig",),
        "vllm_config.model_config": ("vllm.config.ModelConfig",),
        **dict.fromkeys(("config", "text", "served", "self"), PLAIN),  # of transformers, a model's class, a model
    },
    "rollout/vllm/engine.py": {"core": ("vllm.v1.engine.core.EngineCore",), "core.batch_queue": PLAIN},
    "rollout/vllm/experts.py": {
        **dict.fromkeys(("method", "self", "layer.quant_method"), (f"{_MOE}.unquantized_fused_moe_method.{_METHOD}",)),
        "kernel": (f"{_MOE}.experts.cpu_moe.CPUUnquantizedExperts",),
        "adapted": ("vllm.lora.layers.fused_moe.FusedMoEWithLoRA",),
        "layer": (f"{_MOE}.routed_experts.RoutedExperts",),
        "layer.moe_config": (f"{_MOE}.config.FusedMoEConfig",),
        "layer.moe_config.moe_parallel_config": (f"{_MOE}.config.FusedMoEParallelConfig",),
        **dict.fromkeys(("upstream", "weight", "places", "layer.w13_weight", "layer.w2_weight"), PLAIN),
        "core": ("vllm.v1.engine.core.EngineCore",),
        "core.model_executor": ("vllm.v1.executor.uniproc_executor.UniProcExecutor",),
        "core.model_executor.driver_worker": ("vllm.v1.worker.worker_base.WorkerWrapperBase",),
        "core.model_executor.driver_worker.worker": ("vllm.v1.worker.gpu_worker.Worker",),
        **dict.fromkeys(("core.scheduler", "scheduler"), ("vllm.v1.core.sched.scheduler.Scheduler",)),
        "scheduler.kv_cache_manager": ("vllm.v1.core.kv_cache_manager.KVCacheManager",),
        "scheduler_output": ("vllm.v1.core.sched.output.SchedulerOutput",),
        "request": ("vllm.v1.request.Request",),
        "runner": (_RUNNERS[1],),
        "runner.model": PLAIN,  # a module of torch
        "runner.input_batch": ("vllm.v1.worker.gpu_input_batch.InputBatch",),
        "runner.input_batch.block_table[]": ("vllm.v1.worker.block_table.BlockTable",),
        "runner.input_batch.block_table[].slot_mapping": ("vllm.v1.utils.CpuGpuBuffer",),
        "runner.input_batch.block_table[].slot_mapping.gpu[]": PLAIN,
        **dict.fromkeys(("runner.kv_cache_config", "cache"), ("vllm.v1.kv_cache_interface.KVCacheConfig",)),
        "group": ("vllm.v1.kv_cache_interface.KVCacheGroupSpec",),
        "group.kv_cache_spec": ("vllm.v1.kv_cache_interface.FullAttentionSpec",),
        "config": ("vllm.config.VllmConfig",),
        "config.model_config": ("vllm.config.ModelConfig",),
        "config.scheduler_config": ("vllm.config.SchedulerConfig",),
        "moe": (f"{_MOE}.runner.moe_runner.MoERunner",),
        "moe.router": (f"{_MOE}.router.base_router.BaseRouter",),
    },
    "rollout/vllm/structured.py": {
        "vllm_config": ("vllm.config.VllmConfig",),
        "served": ("vllm.config.ModelConfig",),
        "params": ("vllm.sampling_params.SamplingParams",),
        **dict.fromkeys(
            ("matcher", "compiler", "form", "given", "bitmask", "batch_update"), PLAIN
        ),  # xgrammar's and ours
    },
    "rollout/vllm/shared_base.py": {
        "layer": ("vllm.model_executor.layers.linear.LinearBase",),
        "state": (_QUANT_STATE,),
        "args": ("vllm.engine.arg_utils.EngineArgs",),
        **dict.fromkeys(("name", "parameter", "offsets", "args[]", "func", "target"), PLAIN),
    },
    "rollout/vllm/read_back.py": {
        "executor": ("vllm.v1.executor.multiproc_executor.MultiprocExecutor",),
        "executor.response_mqs": PLAIN,
        "queue": ("vllm.distributed.device_communicators.shm_broadcast.MessageQueue",),
        "queue.buffer": ("vllm.distributed.device_communicators.shm_broadcast.ShmRingBuffer",),
        "queue.buffer.shared_memory": PLAIN,  # of the standard library
    },
    "rollout/vllm/tool_parsers.py": {
        "parser": ("vllm.tool_parsers.ToolParser",),
        "found": (f"{_FOUND}.ExtractedToolCallInformation",),
        "call": (f"{_FOUND}.ToolCall",),
        "call.function": (f"{_FOUND}.FunctionCall",),
    },
    "rollout/vllm/arguments.py": dict.fromkeys(("auto", "lm", "name", "config"), PLAIN),  # of transformers
    "cluster/ray_": {
        "node": ("ray._private.node.Node",),
        "process": PLAIN,  # of the standard library
        "ray.remote()": ("ray.actor.ActorClass",),
        "actor_class": ("ray.actor.ActorClass",),
        "group": ("ray.util.placement_group.PlacementGroup",),
    },
    "cluster/ray_actor.py": {
        # Methods of our Host.
        "handle": PLAIN,
        **dict.fromkeys(("handle.apart", "handle.call", "handle.apart.options()"), ("ray.actor.ActorMethod",)),
    },
    "cluster/ray_cluster.py": {
        "node": PLAIN,  # cluster.ray_cluster.Node
        "head": ("ray._private.node.Node",),
        "task": ("ray.remote_function.RemoteFunction",),
        "task.options()": PLAIN,
    },
    "cluster/ray_private.py": {
        "params": ("ray._private.parameter.RayParams",),
        "config": ("ray.job_config.JobConfig",),
        "node._ray_params": ("ray._private.parameter.RayParams",),
    },
    "learner/model/recurrence.py": {"rule": ("fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule",)},
    "learner/trainer/optimizer.py": {"kind": _OPTIMIZERS},
    "learner/model/base.py": {"library": PLAIN, "library.nn": ("bitsandbytes.nn",), "name2qmap": PLAIN},
}

# Functions whose dictionaries become the keywords of a call.
CALLED_WITH = {
    "rollout/vllm/arguments.py:engine_arguments": "vllm.engine.arg_utils.EngineArgs",
    "rollout/vllm/arguments.py:_form_arguments": "vllm.engine.arg_utils.EngineArgs",
    "rollout/vllm/arguments.py:_policy_arguments": "vllm.engine.arg_utils.EngineArgs",
    "rollout/vllm/arguments.py:_cpu_arguments": "vllm.engine.arg_utils.EngineArgs",
    "rollout/vllm/arguments.py:_cuda_arguments": "vllm.engine.arg_utils.EngineArgs",
    "rollout/vllm/read_back.py:shard_arguments": "vllm.engine.arg_utils.EngineArgs",
    "rollout/vllm/arguments.py:lora_arguments": "vllm.engine.arg_utils.EngineArgs",
    "learner/model/attention.py:_by_varlen": "torch.nn.attention.varlen.varlen_attn",
    "cluster/ray_cluster.py:spawn": "ray._common.ray_option_utils.actor_options",
}

# Environment variables and attributes, by how their names begin (the longest counts), and what holds their names. Ray's
# are read in many places: of those is asked only that some file has the name.
TEXT = "TEXT"
VARIABLES = {
    "VLLM_DIST_": f"vllm.{TEXT}",  # set by its worker, and by nobody else
    "VLLM_": "vllm.envs.environment_variables",
    **dict.fromkeys(("RAY_", "DASHBOARD_METRIC_"), f"ray.{TEXT}"),
    "bnb_": f"vllm_bnb_plugin.{TEXT}",  # attributes of a parameter, which the plugin sets by name
}

# Modules that our code asks for by name, and what it counts on there.
ASKED_FOR = {
    "vllm_bnb_plugin": "vllm_bnb_plugin.register",
}

# Attributes that no class of the package names: torch's own of a module, and parameters that are registered by name.
MADE_BY_NAME = {
    "vllm.model_executor.layers.linear.LinearBase": {"weight", "bias", "cpu_linear"},
    "vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead": {"weight", "cpu_linear"},
    "vllm.model_executor.models.llama.LlamaForCausalLM": {"named_modules", "named_parameters"},
    f"{_MOE}.routed_experts.RoutedExperts": {"w13_weight", "w2_weight"},
}

# What our code uses only where it is there, and the versions in which it is.
_SPAN = "vllm.outputs.WeightVersionSpan"
ONLY_IN = {
    "vllm.outputs.CompletionOutput.weight_versions": SpecifierSet(">=0.32"),
    **{f"{_SPAN}.{name}": SpecifierSet(">=0.32") for name in ("version", "start", "end")},
}
