"""The names of torch.cuda that ``torch.node`` does not have, each with the reason, or with what to write instead.

``torch.node`` says it to whoever asks for one of them. tests/unit/test_cuda_names.py holds the table against
torch.cuda: a name that is neither there nor here fails it.
"""

from __future__ import annotations

_ON_THE_NODE = "it is about a GPU as such: dt.run(torch.cuda.{name}, node=1) asks the node's own"
_PROCESS = "it is about CUDA in one process, and a node is a process of its own: dt.run(fn, node=1) runs there"
_TYPES = "torch keeps types of tensors and storages by device for old programs: name a dtype and device='node:1'"
_SEEDS = "torch.manual_seed(s) seeds the script and every node, torch.node.manual_seed(s) the current node"
_ALLOCATOR = "a node's memory is its own process's: {name} is for what allocates in this one"
_HOST = "no memory of the script is pinned for nodes"
_OLD = "torch has deprecated it: torch.node.{instead}"
_GRAPHS = "a step is recorded by dt.graph(g) or @dt.graphed"
_METERS = "nothing meters a node's device from here: dt.run(torch.cuda.{name}, node=1) on one with a GPU"


def _because(why: str, *names: str, **instead: str) -> dict[str, str]:
    return {
        **{name: why.format(name=name) for name in names},
        **{name: why.format(name=name, instead=other) for name, other in instead.items()},
    }


#: The reason why torch.node has no such name, by name.
MISSING: dict[str, str] = {
    **_because(
        _TYPES, *(
            f"{kind}{what}"
            for kind in ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
            for what in ("Storage", "Tensor")
        ), "ComplexDoubleStorage", "ComplexFloatStorage",
    ),
    **_because(
        _ON_THE_NODE, "can_device_access_peer", "clock_rate", "device_memory_used", "get_arch_list",
        "get_device_capability", "get_device_name", "get_device_properties", "get_gencode_flags",
        "is_bf16_supported", "is_tf32_supported", "list_gpu_processes",
    ),
    **_because(_METERS, "memory_usage", "power_draw", "temperature", "utilization"),
    **_because(
        _PROCESS, "AcceleratorError", "CudaError", "DeferredCudaCallError", "ExternalStream", "GreenContext",
        "check_error", "cudaStatus", "cudart", "current_blas_handle", "current_solver_handle", "get_sync_debug_mode",
        "get_stream_from_external", "init", "ipc_collect", "set_sync_debug_mode",
    ),
    **_because(
        _ALLOCATOR, "CUDAPluggableAllocator", "MemPool", "caching_allocator_alloc", "caching_allocator_delete",
        "caching_allocator_disabled", "caching_allocator_enable", "change_current_allocator", "get_allocator_backend",
        "get_per_process_memory_fraction", "memory_snapshot", "set_per_process_memory_fraction", "use_mem_pool",
    ),
    **_because(
        _HOST, "host_memory_stats", "host_memory_stats_as_nested_dict", "reset_accumulated_host_memory_stats",
        "reset_peak_host_memory_stats",
    ),
    **_because(
        _OLD, max_memory_cached="max_memory_reserved", memory_cached="memory_reserved",
        reset_max_memory_allocated="reset_peak_memory_stats", reset_max_memory_cached="reset_peak_memory_stats",
    ),
    **_because(
        _GRAPHS, "CUDAGraph", "export_dot", "export_graph_data", "graph", "graph_annotations", "graph_pool_handle",
        "is_current_stream_capturing", "make_graphed_callables",
    ),
    **_because(_SEEDS, "default_generators", "initial_seed", "seed", "seed_all"),
    "OutOfMemoryError": "it is torch.OutOfMemoryError, which a node's GPU raises; a CPU raises RuntimeError",
    "device_of": "with dt.node(x.get_node()): makes a tensor's node the current one",
    "get_rng_state_all": "[torch.node.get_rng_state(k) for k in range(torch.node.device_count())]",
    "set_rng_state_all": "torch.node.set_rng_state(state, k) for each node",
    "has_half": "it is about how a CUDA build was made",
    "has_magma": "it is about how a CUDA build was made",
    "PYTORCH_RELEASES_CODE_CC": "it is about how a CUDA build was made",
    **_because(
        "it is about how a CUDA build was made", "DEVICE_REQUIREMENT", "DEVICE_REQUIREMENT_POST_JETSON_SBSA_UNIFICATION"
    ),
}  # fmt: skip
