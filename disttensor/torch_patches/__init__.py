"""The replacements in torch: one list, with the reason for each, and the loop that installs them.

A row names its target and a function ``make(original)`` that returns the replacement. For a new version of torch this
table lists the places to check: the error of `install` names a target that is gone, and ``uninstall`` puts everything
back, which the tests do. Documented hooks (``torch.library``, ``register_package``, optimizers' step hooks,
``rename_privateuse1_backend``) are no patches.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..runtime.process import torch_switches
from ..runtime.protocol.errors import DisttensorError

#: The moments at which rows are installed: when torch gets the device's name, at the first session, and when a program
#: first uses torch.compile, FSDP, ``with dt.node(1)``, a recording, a profile or ``mesh.torch``.
IMPORT, SESSION, COMPILING, SHARDING, ELSEWHERE, RECORDING, PROFILING, DEVICE_MESH = (
    "import", "session", "compiling", "sharding", "elsewhere", "recording", "profiling", "device_mesh",
)  # fmt: skip


@dataclass(frozen=True)
class Patch:
    """A row of the table: one replacement."""

    target: str  #: dotted; ``torch.optim.*.x`` stands for x in every module of torch.optim that has one
    make: str  #: "module:function" below disttensor: of the original, the replacement
    when: str
    why: str
    #: the change in torch that would make the row needless
    wanted: str
    optional: bool = False  #: some of the supported versions of torch lack the target
    adds: bool = False  #: torch has no such attribute: the row adds it


_ONE_ACCELERATOR = "more than one accelerator in a process, or an out-of-tree backend that is not the accelerator"
_LOCAL = "torch_backend.keep_local_accelerator"
_BY_DEVICE = "collectives that ask the tensors' device"
_DISTRIBUTED = "torch_backend.torch_distributed"
_AS_TORCH = "meshes.as_torch"
_DTENSOR = "torch.distributed.tensor"
_FSDP = "torch.distributed.fsdp._fully_shard"
_NO_RANK = "a DeviceMesh of a program that is no rank"

PATCHES: tuple[Patch, ...] = (
    # ---- when torch has the device's name (torch_backend/naming.py)
    Patch(
        "torch.utils.backend_registration._rename_privateuse1_backend", "torch_backend.naming:refuse_another", IMPORT,
        "another library that took the device's name would take ours", "several out-of-tree backends in a process",
    ),
    Patch(
        "torch.Tensor.dist_send", "torch_backend.naming:dist_send", IMPORT,
        "local tensors go to nodes as proxies do: x.dist_send(1)", "nothing: this is a method more", adds=True,
    ),
    Patch(
        "torch.nn.Module.dist_send", "torch_backend.naming:module_dist_send", IMPORT,
        "modules go to nodes by their tensors' word: net.dist_send(1)", "nothing: this is a method more", adds=True,
    ),
    Patch(
        "torch._C._accelerator_getAccelerator", f"{_LOCAL}:get_accelerator", IMPORT,
        "torch takes the one out-of-tree backend for the accelerator, before CUDA even; local programs mean their own",
        _ONE_ACCELERATOR,
    ),
    Patch(
        "torch._C._get_accelerator", f"{_LOCAL}:get_local_accelerator", IMPORT,
        "process groups and FSDP ask so for tensors of this process, and keep the answer beyond a session",
        _ONE_ACCELERATOR,
    ),
    *(
        Patch(
            f"torch._C.{name}", f"{_LOCAL}:accelerator_call", IMPORT,
            "torch.accelerator asks the C++ of the one accelerator; a backend in Python has none", _ONE_ACCELERATOR,
            optional=True,
        )
        for name in (
            "_accelerator_getDeviceIndex", "_accelerator_setDeviceIndex", "_accelerator_getStream",
            "_accelerator_setStream", "_accelerator_synchronizeDevice", "_accelerator_exchangeDevice",
            "_accelerator_maybeExchangeDevice", "_accelerator_getDeviceCapability",
            "_accelerator_isAllocatorInitialized", "_accelerator_emptyCache", "_accelerator_emptyHostCache",
            "_accelerator_getDeviceStats", "_accelerator_getMemoryInfo", "_accelerator_resetAccumulatedStats",
            "_accelerator_resetPeakStats",
        )
    ),
    Patch(
        "torch.Tensor.pin_memory", f"{_LOCAL}:pin_memory", IMPORT,
        "it asks the accelerator's allocator; what goes to a node may lie in memory of any kind", _ONE_ACCELERATOR,
    ),
    Patch(
        "torch.Event", f"{_LOCAL}:event", IMPORT,
        "torch's own does nothing for a backend in Python: a wait returned while the memory that it guards was read",
        "events of Python backends",
    ),
    Patch(
        "torch.Stream", f"{_LOCAL}:stream", IMPORT, "the same of streams", "streams of Python backends",
    ),
    Patch(
        "torch.distributed.distributed_c10d.BackendConfig.__init__", f"{_LOCAL}:default_backend", IMPORT,
        "a process group that names no backend takes that of the accelerator (torch 2.15); ranks are of this process",
        _ONE_ACCELERATOR, optional=True,
    ),
    Patch(
        "torch.utils.checkpoint.DefaultDeviceType.get_device_type", f"{_LOCAL}:default_device_type", IMPORT,
        "it asks once for the accelerator, and keeps the answer beyond a session", "asking at each call",
    ),
    # ---- at the first session (torch_backend/register.py)
    Patch(
        "torch._C._set_default_dtype", "torch_backend.register:set_default", SESSION,
        "nodes and cached plans have to follow torch.set_default_dtype at once", "a hook for changes of the default",
    ),
    Patch(
        "torch._C._set_default_tensor_type", "torch_backend.register:set_default", SESSION,
        "the same of torch.set_default_tensor_type", "a hook for changes of the default",
    ),
    Patch(
        "torch.DistributedTensor", "proxy.proxy:class_of_proxies", SESSION,
        "the class of proxies says that it is torch's, for libraries that go by that; cloudpickle looks whether it is",
        "nothing: this is a name more", adds=True,
    ),
    *(
        Patch(
            setter, "torch_backend.switches:following", SESSION,
            "what a script sets of determinism, precision and kernels has to hold on nodes at once",
            "a hook for changes of torch's global switches", optional=True,
        )
        for setter in torch_switches.SETTERS
    ),
    *(
        Patch(
            f"torch.{module}.warnings", "dispatch.meta_inference:QuietWarnings", SESSION,
            "a meta kernel in Python that is asked for a shape warns of what the kernel warns of: a warning came twice",
            "meta kernels that leave warnings to the kernels",
        )
        for module in ("_prims_common", "_prims_common.wrappers")
    ),
    Patch(
        "torch.backends.ContextProp.__set__", "torch_backend.switches:of_attributes", SESSION,
        "torch.backends.cudnn.deterministic = True: its properties have kept the setters that are replaced above",
        "a hook for changes of torch's global switches",
    ),
    Patch(
        "torch.autograd.graph._engine_run_backward", "torch_backend.backward:run_backward", SESSION,
        "an error in Python's device guard ends the process in C++: backwards of proxies run in the calling thread",
        "device guards in Python that may raise",
    ),
    Patch(
        "torch.autograd._engine_run_backward", "torch_backend.backward:run_backward", SESSION,
        "the same function by its other name", "device guards in Python that may raise",
    ),
    Patch(
        "torch.clear_autocast_cache", "torch_backend.autocast:clearing", SESSION,
        "parameters that were cast on nodes are forgotten with those that torch keeps", "a hook for autocast's end",
    ),
    Patch(
        "torch.Tensor.data", "storage.set_data:settable", SESSION,
        "p.data = q and Module.to keep a parameter's identity between the script and nodes; torch refuses",
        "swap_tensors for set_data between kinds of tensors",
    ),
    Patch(
        "torch.nn.Module._apply", "storage.modules:applying", SESSION,
        "ScriptModules keep their parameters in C++, and what becomes of the Python objects changes nothing",
        "swap_tensors for set_data between kinds of tensors",
    ),
    Patch(
        "torch.jit.load", "storage.modules:loading", SESSION,
        "map_location='node:1': C++ makes tensors that no proxy stands for", "asking the device's module",
    ),
    *(
        Patch(
            f"torch.jit.{kind}.{name}", "storage.modules:saving", SESSION,
            "the storage of a tensor on a node can't be written from C++", "asking the tensors for their bytes",
        )
        for kind in ("ScriptModule", "RecursiveScriptModule")
        for name in ("save", "save_to_buffer")
    ),
    Patch(
        "torch._has_compatible_shallow_copy_type", "storage.set_data:compatible", SESSION,
        "Module.to asks it whether parameters can stay the same objects", "asking the tensors' classes",
    ),
    *(
        Patch(
            f"torch.nn.parameter.{name}.__new__", "storage.uninitialized:new", SESSION,
            "nn.LazyLinear(5, device='node:1'): torch makes tensors of its own class only", "asking the device",
        )
        for name in ("UninitializedParameter", "UninitializedBuffer")
    ),
    Patch(
        "torch._utils.set_tensor_metadata", "storage.storages:set_bits_of_loaded", SESSION,
        "a lazy conjugate that is loaded to a node has to be one for its proxy, too", "a method of the tensor",
    ),
    Patch(
        "torch.UntypedStorage.__new__", "storage.storages:new_storage", SESSION,
        "for a device without an allocator in C++ it ends the process", "an error in its place",
    ),
    Patch(
        "torch.Generator", "dispatch.rng_states:generator_class", SESSION,
        "torch.Generator(device='node:1'): C++ knows no generators of Python backends", "generators of Python backends",
    ),
    Patch(
        "torch.utils.checkpoint.get_device_states", "dispatch.rng_states:getting", SESSION,
        "a recomputation has to draw the same numbers on nodes", "device modules asked for their tensors' places",
    ),
    Patch(
        "torch.utils.checkpoint.set_device_states", "dispatch.rng_states:setting", SESSION,
        "the other half of it", "device modules asked for their tensors' places",
    ),
    *(
        Patch(
            f"torch.optim.{name}._default_to_fused_or_foreach", f"torch_backend.foreach_optimizers:{make}", SESSION,
            "one command for all parameters; torch has a fixed list of devices that gain by it",
            "asking the device module",
        )
        for make, names in (
            ("same_both_ways", ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "rprop", "sgd")),
            ("other_roundings", ("asgd", "nadam", "radam")),
        )
        for name in names
    ),
    *(
        Patch(
            f"torch.nested.{name}", "torch_backend.nested:refusing", SESSION,
            "a nested tensor of tensors on nodes: C++ fails in its middle, or makes one that nothing can use",
            "asking the device for its layouts", optional=True,
        )
        for name in ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow", "masked_select")
    ),
    Patch(
        "torch.nested._internal.nested_tensor.NestedTensor.__new__", "torch_backend.nested:new", SESSION,
        "a jagged tensor's copy to a node, which torch makes of its parts", "asking the device for its layouts",
    ),
    Patch(
        "torch.nn.utils.clip_grad._get_total_norm", "meshes.gradients:of_whole_tensors", SESSION,
        "clip_grad_norm_ of gradients that are cut along a dim of a mesh: the norm is that of the whole ones",
        "asking the tensors for their norm as they are put together",
    ),
    Patch(
        "torch.nn.utils.get_total_norm", "meshes.gradients:of_whole_tensors", SESSION,
        "the same function by its other name", "asking the tensors for their norm as they are put together",
    ),
    Patch(
        "torch.nn.SyncBatchNorm.forward", "training.sync_batch_norm:synchronizing", SESSION,
        "on a mesh the statistics are those of all ranks; torch's layer finds no process group, and is BatchNorm then",
        "asking the device module for the ranks of a tensor",
    ),
    Patch(
        "torch.optim.swa_utils._get_foreach_kernels_supported_devices", "torch_backend.composites.overrides:averaging",
        SESSION, "AveragedModel rounds as the node's own kind of device does; for CPUs torch's choice would wait, too",
        "asking the device module",
    ),
    Patch(
        "torch.fx.experimental.proxy_tensor.HANDLED_TYPES", "torch_backend.torch_compile:handled_types", SESSION,
        "make_fx would record what dispatch does instead of the operation",
        "a way for a subclass to say that it is an ordinary tensor",
    ),
    Patch(
        "torch._subclasses.fake_tensor.FakeTensorMode.avoid_device_init",
        "torch_backend.torch_compile:avoid_device_init", SESSION,
        "a literal of our device would be made at once while a function is traced, and kept beyond its session",
        "asking the device module",
    ),
    Patch(
        "torch._TorchCompileInductorWrapper.apply_options", "torch_backend.torch_compile:taking_engine", SESSION,
        "torch.compile(model, options={'engine': 'inductor'}): what replays on the nodes", "options of a device's own",
    ),
    Patch(
        "torch._TorchCompileInductorWrapper.__eq__", "torch_backend.torch_compile:comparing", SESSION,
        "dynamo would play what was compiled with another engine", "options of a device's own",
    ),
    # ---- torch.distributed given tensors on nodes (torch_backend/torch_distributed.py)
    *(
        Patch(
            f"torch.distributed.distributed_c10d.{name}", f"{_DISTRIBUTED}:checking", SESSION,
            "a collective of torch's that gets a tensor on a node would ask for a process group: ours is named instead",
            _BY_DEVICE,
        )
        for name in ("_check_single_tensor", "_check_tensor_list")
    ),
    Patch(
        "torch.distributed.distributed_c10d._get_default_group", f"{_DISTRIBUTED}:asking", SESSION,
        "the same of those that look for a group first", _BY_DEVICE,
    ),
    *(
        Patch(
            f"torch.nn.parallel.{name}.__init__", f"{_DISTRIBUTED}:refusing_modules", SESSION, "the same of a model",
            _BY_DEVICE,
        )
        for name in ("DistributedDataParallel", "DataParallel")
    ),
    Patch(
        "torch.nn.parallel.data_parallel._get_available_device_type", f"{_LOCAL}:parallel_device_type", SESSION,
        "torch.nn.DataParallel of a local module would spread it over nodes, and refuses it as it is local",
        _ONE_ACCELERATOR,
    ),
    Patch(
        "torch.distributed.device_mesh.DeviceMesh._setup_world_group_and_device",
        f"{_AS_TORCH}.made_by_torch:setting_up", SESSION,
        "init_device_mesh('node', ...) in the script would ask for the environment of a rank", _NO_RANK,
    ),
    # ---- with torch.distributed.fsdp (torch_backend/register.py)
    *(
        Patch(
            f"torch.distributed.fsdp.{name}", f"{_DISTRIBUTED}:refusing_modules", SHARDING, "the same of a model",
            _BY_DEVICE, optional=True,
        )
        for name in ("fully_shard", "FullyShardedDataParallel.__init__")
    ),
    # ---- with torch.distributed.fsdp, over mesh.torch (meshes/as_torch/fsdp.py)
    *(
        Patch(f"{_FSDP}.{name}", f"{_AS_TORCH}.fsdp:{make}", SHARDING, why, wanted)
        for name, make, why, wanted in (
            ("*._chunk_with_empty", "chunking", "a rank takes its part from a list, by its number", _NO_RANK),
            ("*.alloc_storage", "allocating", "it asks the nodes for the size of a parameter's memory", "no question"),
            ("*.free_storage", "freeing", "the same question", "no question"),
            ("*._get_device_from_mesh", "device_of", "a DeviceMesh knows the type of its device only", _NO_RANK),
            ("*._get_device_handle", "device_module", "streams are of a rank's device; a mesh is in order", _NO_RANK),
            ("*.ReduceScatterState", "unkept", "memory is kept for a stream; a mesh is in order", _NO_RANK),
            ("*.AllReduceState", "unkept", "the same of replicas", _NO_RANK),
            ("_fsdp_param_group.FSDPParamGroup.__init__", "grouping", "the same; it may offload to here", _NO_RANK),
        )
    ),
    # ---- with the first torch.compile (torch_backend/torch_compile.py)
    Patch(
        "torch._TorchCompileInductorWrapper.__call__", "torch_backend.torch_compile:running", COMPILING,
        "inductor can't compile for nodes: what involves them is recorded", "asking the backend of the tensors' device",
    ),
    Patch(
        "torch._dynamo.variables.builder.infer_subclass_type", "torch_backend.torch_compile:infer_subclass_type",
        COMPILING, "a subclass with a dispatch of its own is an opaque object to dynamo, and each use breaks the graph",
        "a way for a subclass to say that it is an ordinary tensor",
    ),
    # ---- with the first `with dt.node(1)` (session/node_context.py)
    Patch(
        "torch.Tensor.to", "session.node_context:following", ELSEWHERE,
        "local.to('node') follows the current node; a guard in Python can't be asked for the index",
        "device guards in Python that are asked",
    ),
    # ---- with the first recording (graphs/optimizer_steps.py)
    Patch(
        "torch.optim.*._get_value", "graphs.optimizer_steps:get_value", RECORDING,
        "an optimizer's count of its steps is a number that each replay gives anew", "capturable optimizers everywhere",
    ),
    # ---- with the first mesh.torch (meshes/as_torch/world.py)
    Patch(
        "torch.distributed.device_mesh.DeviceMesh._init_one_process_group", f"{_AS_TORCH}.device_mesh:making_groups",
        DEVICE_MESH, "the script is in no line of ranks: a group has all lines along a dim", _NO_RANK,
    ),
    Patch(
        "torch.distributed.device_mesh.DeviceMesh._compute_coordinate_on_dim", f"{_AS_TORCH}.device_mesh:coordinates",
        DEVICE_MESH, "a coordinate is that of each rank, and no int", _NO_RANK,
    ),
    Patch(
        "torch.distributed.device_mesh.DeviceMesh._get_mesh_tensor_from_full_mesh", f"{_AS_TORCH}.device_mesh:tables",
        DEVICE_MESH, "the part of the ranks' table that each rank is in is a tensor on the mesh", _NO_RANK,
    ),
    Patch(
        "torch.Tensor._wrapped_number", f"{_AS_TORCH}.rank_numbers:refusing_operands", DEVICE_MESH,
        "a local tensor plus a number of ranks would be that plus 7777777", "an error there", adds=True,
    ),
    Patch(
        "torch.sym_ite", f"{_AS_TORCH}.rank_numbers:choosing", DEVICE_MESH,
        "one of two numbers, by what is true on each rank: torch asks for nodes of its own class",
        "as for other operators",
    ),
    Patch(
        f"{_DTENSOR}.placement_types.Shard.local_shard_size_and_offset", f"{_AS_TORCH}.dtensor:sizes_of_parts",
        DEVICE_MESH, "parts of several sizes are refused in words", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}.placement_types.Shard._maybe_unpad_tensor_with_sizes", f"{_AS_TORCH}.dtensor:without_padding",
        DEVICE_MESH, "a rank's padding is looked up in a list", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}.placement_types._StridedShard.local_shard_size_and_offset", f"{_AS_TORCH}.dtensor:strided_sizes",
        DEVICE_MESH, "a rank's entries are looked up in a list", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}.placement_types._StridedShard._select_shard", f"{_AS_TORCH}.dtensor:picking", DEVICE_MESH,
        "a rank's part is looked up in a list", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}.placement_types._StridedShard._select_split_tensor", f"{_AS_TORCH}.dtensor:picking_parts",
        DEVICE_MESH, "a rank's part is looked up in a list", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}._utils._compute_local_shape_and_global_offset", f"{_AS_TORCH}.dtensor:shapes_and_offsets",
        DEVICE_MESH, "where a rank's part starts is looked up in a list", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}._nonlinear_redux.compute_local_shape_and_global_offset",
        f"{_AS_TORCH}.dtensor:offsets_as_tensors", DEVICE_MESH, "where a rank's part starts is added to indices",
        _NO_RANK, optional=True,
    ),
    Patch(
        f"{_DTENSOR}._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
        f"{_AS_TORCH}.dtensor:on_one_device", DEVICE_MESH,
        "fake tensors on the type of the mesh's device are on what is current, or on what once was",
        "a device for a DeviceMesh",
    ),
    Patch(
        f"{_DTENSOR}.DTensor._op_dispatcher._custom_op_handlers", f"{_AS_TORCH}.dtensor:comparing", DEVICE_MESH,
        "what a rank found goes to the others in a tensor on the type of their device", "a device for a DeviceMesh",
    ),
    Patch(
        "torch.distributed.device_mesh._MeshEnv.num_devices_per_host", f"{_AS_TORCH}.dtensor:devices_per_host",
        DEVICE_MESH, "nodes on CPUs are no devices that a host has several of", "what a collective costs, by a mesh",
    ),
    *(
        Patch(
            f"{_DTENSOR}.{module}.mesh_scatter", f"{_AS_TORCH}.dtensor:scattering", DEVICE_MESH,
            "one rank calls another function than the others", _NO_RANK,
        )
        for module in ("_collective_utils", "placement_types")
    ),
    Patch(
        f"{_DTENSOR}.placement_types._MaskPartial._mask_tensor", f"{_AS_TORCH}.dtensor:masking", DEVICE_MESH,
        "indices are compared with where a rank's part starts", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}._random.OffsetBasedRNGTracker.__init__", f"{_AS_TORCH}.dtensor:tracking", DEVICE_MESH,
        "it asks for the generator of a rank's device", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}._random.OffsetBasedRNGTracker._distribute_region", f"{_AS_TORCH}.dtensor:drawing", DEVICE_MESH,
        "ranks with the same part draw the same numbers: nodes have generators for that", _NO_RANK,
    ),
    Patch(
        f"{_DTENSOR}._api._dtensor_init_helper", f"{_AS_TORCH}.dtensor:made_on_the_mesh", DEVICE_MESH,
        "a DeviceMesh knows the type of its device, which would be node 0", "a device for a DeviceMesh",
    ),
    Patch(
        f"{_DTENSOR}.DTensor.__repr__", f"{_AS_TORCH}.dtensor:printing", DEVICE_MESH,
        "a tensor of no dimension prints as one number, and ranks have different ones", "repr() of the local tensor",
    ),
    Patch(
        f"{_DTENSOR}.DTensor.item", f"{_AS_TORCH}.dtensor:reading", DEVICE_MESH,
        "the value of a sum to come is that of none of its parts", "an error there",
    ),
    Patch(
        "torch.distributed._functional_collectives._maybe_wrap_tensor", f"{_AS_TORCH}.dtensor:unwrapped", DEVICE_MESH,
        "what a collective gives is a plain tensor: what comes next on the nodes comes after it",
        "a word of the process group that nobody has to wait",
    ),
    # ---- with the first profile (seeing/profile.py)
    Patch(
        "torch.autograd.profiler.record_function.__enter__", "seeing.torch_regions:entering", PROFILING,
        "torch.profiler.record_function names a part of the script for a timeline, too", "a hook for them in Python",
    ),
    Patch(
        "torch.autograd.profiler.record_function.__exit__", "seeing.torch_regions:leaving", PROFILING,
        "the end of such a part", "a hook for them in Python",
    ),
)  # fmt: skip

_NOTHING = object()
#: The installed replacements, in order: (owner, attribute, the owner's own value before). And the moments whose rows
#: are installed.
_undo: list[tuple[Any, str, Any]] = []
_installed: set[str] = set()


def install(when: str) -> None:
    """Installs the rows of a moment; a second call does nothing. Raises as ``check``, and has replaced nothing then."""
    if when in _installed:
        return
    check(when)
    _installed.add(when)
    for patch in PATCHES:
        if patch.when == when:
            for owner, name in _owners(patch):
                module, _, function = patch.make.partition(":")
                make: Callable[[Any], Any] = getattr(importlib.import_module(f"disttensor.{module}"), function)
                own = vars(owner).get(name, _NOTHING)
                _undo.append((owner, name, own))
                setattr(owner, name, make(getattr(owner, name, None)))


def check(when: str) -> None:
    """Raises DisttensorError, which names the target, if torch lacks a target of a moment's rows."""
    for patch in PATCHES:
        if patch.when == when and not patch.optional and not _owners(patch):
            import torch

            raise DisttensorError(
                f"torch {torch.__version__} has no {patch.target}, which disttensor replaces ({patch.why}): use a "
                "torch that docs/COMPATIBILITY.md names"
            )


def uninstall() -> None:
    """Puts back everything that was replaced, for tests."""
    while _undo:
        owner, name, own = _undo.pop()
        if own is _NOTHING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
    _installed.clear()


def _owners(patch: Patch) -> list[tuple[Any, str]]:
    """Returns the objects that have the target as an attribute, each with the attribute's name."""
    path, _, name = patch.target.rpartition(".")
    if path.endswith(".*"):
        owners = [m for n, m in sorted(sys.modules.items()) if n.startswith(path[:-1]) and hasattr(m, name)]
    else:
        owner = _found(path)
        owners = [owner] if owner is not None and (patch.adds or hasattr(owner, name)) else []
    return [(owner, name) for owner in owners]


def _found(path: str) -> Any:
    """Returns the module or class of this name, or None."""
    parts = path.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except ImportError:
            continue
        for part in parts[n:]:
            found = getattr(found, part, None)
        return found
    return None
