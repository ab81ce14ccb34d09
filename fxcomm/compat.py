"""Every private or unstable torch API that fxcomm uses, behind a small public face.

Checked on torch 2.13.0 (CPU, gloo). Supported: 2.11 to 2.14. When a torch release moves something,
this is the only file to change.
"""

from __future__ import annotations

import dis
import functools
import gc
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar, cast

import sympy
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.ir as inductor_ir
import torch._inductor.lowering as inductor_lowering
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the _c10d_functional operators
import torch.fx
from torch import nn
from torch._C._distributed_c10d import (
    HashStore,
    PrefixStore,
    Store,
    _register_work,
    _resolve_process_group,
)
from torch._C._distributed_c10d import Work as Work
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import LocalSource
from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx as _compile_fx
from torch._inductor.compile_fx import compile_fx_inner as _compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import _global_optimizer_pre_hooks

Wrapper = TypeVar("Wrapper", bound=torch.Tensor)
InnerCompiler = Callable[..., Callable[..., Any]]

# Inductor reorders nodes for memory and locality after we chose where collectives start; either
# pass pulls a wait back to its launch, so both stay off in graphs that hold collectives.
KEEP_LAUNCH_ORDER: Mapping[str, object] = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
}

# Inductor computes in 32 bits and leaves out roundings to 16 bits in between.
ROUND_AS_WRITTEN: Mapping[str, object] = {"emulate_precision_casts": True}

# What ``torch.compile``'s wrapper puts in front of the names of the parameters below it.
COMPILED_PREFIX = "_orig_mod."


# --- compiling ------------------------------------------------------------------------------


def compile_fx(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    config: Mapping[str, object],
    inner_compile: InnerCompiler | None = None,
) -> Callable[..., Any]:
    """Inductor's whole pipeline, with ``inner_compile`` in the place of its graph compiler.

    AOTAutogradCache is off when ``inner_compile`` is given: on a hit it would skip it.
    """
    patches = dict(config) or None
    if inner_compile is None:
        return cast(
            Callable[..., Any],
            _compile_fx(gm, example_inputs, config_patches=patches),  # type: ignore[arg-type]
        )
    with functorch_config.patch(enable_autograd_cache=False):
        return cast(
            Callable[..., Any],
            _compile_fx(
                gm,
                example_inputs,  # type: ignore[arg-type]
                inner_compile=inner_compile,  # type: ignore[arg-type]
                config_patches=patches,
            ),
        )


def compile_inner(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    config: Mapping[str, object] | None = None,
    **kwargs: object,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Inductor's compiler for one post-AOT graph; the result takes a list that it empties."""
    patch = inductor_config.patch(dict(config)) if config else nullcontext()
    with patch:
        return cast(
            Callable[[list[Any]], Sequence[Any]],
            _compile_fx_inner(gm, example_inputs, **kwargs),  # type: ignore[arg-type]
        )


def lower_in_place(operator: torch._ops.OpOverload) -> None:
    """Teaches Inductor ``operator(parts, strides, offsets, numel)``: a flat tensor of ``numel``
    elements with each part, dense, at its offset with its strides, and zeros everywhere else.

    A kernel that can write its result anywhere writes its part there; other parts are copied.
    Inductor's cache on disk knows the operator by its name alone.
    """
    inductor_lowering.register_lowering(operator, type_promotion_kind=None)(_lower_in_place)


def _lower_in_place(
    parts: Sequence[Any], strides: Sequence[int], offsets: Sequence[int], numel: int
) -> Any:
    """What Inductor does for ``aten.cat``, with places of any strides for the parts."""
    dtype, device = parts[0].get_dtype(), parts[0].get_device()
    layout = inductor_ir.FixedLayout(device, dtype, [numel], [1])
    filled: list[Any] = []
    buffer = inductor_ir.ConcatKernel(name=None, layout=layout, inputs=filled)
    storage = inductor_ir.StorageBox(buffer)

    def put(part: Any, strides: Sequence[int], offset: int) -> None:
        place = inductor_ir.FixedLayout(device, dtype, part.get_size(), list(strides), offset)
        view = inductor_ir.ReinterpretView(data=storage, layout=place)
        filled.append(inductor_ir.ConcatKernel.realize_into(part, view))

    def put_zeros(start: int, end: int) -> None:
        if start < end:
            zeros = inductor_lowering.full([end - start], 0, dtype=dtype, device=device)
            put(zeros, [1], start)

    end, left = 0, list(strides)
    nodes = cast(Sequence[torch.fx.Node], V.graph.current_node.args[0])
    for node, part, offset in zip(nodes, parts, offsets, strict=True):
        put_zeros(end, offset)
        own, left = left[: len(part.get_size())], left[len(part.get_size()) :]
        # What the graph also returns needs memory of its own: its owner may change it.
        put(inductor_lowering.clone(part) if _is_returned(node) else part, own, offset)
        end = offset + int(part.get_numel())
    put_zeros(end, numel)
    buffer.name = V.graph.register_buffer(buffer)
    buffer.inputs = inductor_ir.ConcatKernel.unwrap_storage(filled)
    V.graph.register_operation(buffer)
    return inductor_ir.TensorBox(storage)


def _is_returned(node: torch.fx.Node) -> bool:
    """Whether the node or a view of it is an output of its graph."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def compile_context() -> Callable[[], AbstractContextManager[None]]:
    """Remembers the tracing context of the running compilation, so that a graph captured in it can
    be lowered later. The result opens it again."""
    context = TracingContext.try_get()

    @contextmanager
    def reopen() -> Iterator[None]:
        if context is None:
            yield
            return
        with tracing(context):
            yield

    return reopen


def trace_in_place(
    function: Callable[..., object], examples: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A function of tensors, which it changes in place, as a post-AOT graph for any sizes, and the
    graph's example inputs. Sizes that are equal in ``examples`` are the same size; 0 and 1 are not
    among those that the graph is for."""
    functional = torch.func.functionalize(function, remove="mutations")
    traced = make_fx(
        functional, decomposition_table=select_decomp_table(), tracing_mode="symbolic"
    )(*examples)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return traced, [node.meta["val"] for node in placeholders]


def fake_mode_of(values: Sequence[object]) -> Any:
    """The fake tensor mode of a graph's example values, or None if they are real tensors."""
    return detect_fake_mode(list(values))


def without_fake_mode() -> AbstractContextManager[object]:
    """Tensors made inside are no fake ones, whatever mode is on."""
    return unset_fake_temporarily()


def wrapper_like(cls: type[Wrapper], tensor: torch.Tensor) -> Wrapper:
    """A tensor subclass instance with the metadata of ``tensor`` and no elements."""
    made: Wrapper = torch.Tensor._make_wrapper_subclass(
        cls, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made


def alias(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its own, which begins at its first element."""
    own: torch.Tensor = torch.from_dlpack(flat)  # type: ignore[attr-defined]
    return own


def boxed(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Marks a callable as one that takes its arguments in a list, which it empties.

    A plain function, since AOTAutograd wraps what a compiler returns and only a function's
    attributes survive that.
    """

    def call(args: list[Any]) -> Sequence[Any]:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class LateGuards:
    """Guards on symbolic sizes that arise when a graph is compiled after Dynamo made its own.

    Dynamo froze the shape environment by then and would ignore them; the compiled graph would be
    run outside the sizes it is right for. Here they are recorded; :meth:`hold` checks them on the
    arguments of a call.
    """

    def __init__(self, example_inputs: Sequence[object]) -> None:
        self._symbolic = [
            i for i, value in enumerate(example_inputs) if isinstance(value, torch.SymInt)
        ]
        self._example_inputs = example_inputs
        self._code: str | None = None
        mode = detect_fake_mode(list(example_inputs))
        self._shape_env = mode.shape_env if mode is not None and self._symbolic else None

    @property
    def any(self) -> bool:
        """Whether there is anything to check."""
        return self._code is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the guards that the body adds to the graph's shape environment."""
        env = self._shape_env
        if env is None:
            yield
            return
        frozen, before = env.frozen, len(env.guards)
        env.frozen = False
        try:
            yield
        finally:
            env.frozen = frozen
        added = env.guards[before:]
        if added:
            placeholders = [cast(Any, self._example_inputs[i]) for i in self._symbolic]
            self._code = env.produce_guards_expression(placeholders, guards=added)

    def hold(self, args: Sequence[object]) -> bool:
        """Whether the recorded guards hold for the graph's actual arguments."""
        if self._code is None or self._shape_env is None:
            return True
        return bool(
            self._shape_env.evaluate_guards_expression(
                self._code, [args[i] for i in self._symbolic]
            )
        )


def past_dynamo(error: Exception) -> Exception:
    """The error as one of its own class that Dynamo lets through; others reach the user wrapped in
    ``BackendCompilerFailed``, and could not be caught by their class."""
    named = {"__module__": type(error).__module__}
    kind = type(type(error).__name__, (ShortenTraceback, type(error)), named)
    passed: Exception = kind(*error.args, first_useful_frame=None)
    return passed


# --- what a captured graph says about itself ------------------------------------------------


def gradient_inputs(output: torch.fx.Node) -> dict[int, int]:
    """Which outputs of a post-AOT backward graph are gradients of which graph inputs.

    Returns a map from output position to the index of the input in Dynamo's graph.
    """
    descriptors = output.meta.get("desc") or ()
    return {
        position: descriptor.grad_of.idx
        for position, descriptor in enumerate(descriptors)
        if isinstance(descriptor, GradAOTOutput)
        and isinstance(descriptor.grad_of, PlainAOTInput)
        and output.args[0][position] is not None  # type: ignore[index]
    }


def plain_inputs(gm: torch.fx.GraphModule) -> dict[int, int]:
    """Which placeholders of a post-AOT graph are which inputs of Dynamo's graph, by position."""
    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    descriptors = (node.meta.get("desc") for node in placeholders)
    return {i: d.idx for i, d in enumerate(descriptors) if isinstance(d, PlainAOTInput)}


def size_expression(size: int | torch.SymInt) -> sympy.Expr:
    """A tensor's size as a sympy number, or as the expression behind it if it is symbolic."""
    if isinstance(size, torch.SymInt):
        return cast(sympy.Expr, size.node.expr)
    return sympy.Integer(size)


def is_view(node: torch.fx.Node) -> bool:
    """Whether a node only looks at its operand's memory in another way, and never copies."""
    return _declares_view(node) and not may_copy(node)


def may_copy(node: torch.fx.Node) -> bool:
    """Whether a node gives a view of its operand or a copy, whichever its strides ask for, as
    ``reshape`` and ``contiguous`` do."""
    return _declares_view(node) and cast(Any, node.target).has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _declares_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target.is_view)


def written_operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operands that a node writes in place, by its operator's schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            members = given if isinstance(given, list | tuple) else [given]
            written += [member for member in members if isinstance(member, torch.fx.Node)]
    return written


def guard_identity(gm: torch.fx.GraphModule, inputs: Collection[int]) -> None:
    """Binds the graph that is being compiled to the very objects that it got as ``inputs``.

    Parameters are ordinary inputs of Dynamo's graphs, and a graph made for one module serves
    another of the same structure: its backward would reduce the wrong module's gradients. With a
    guard on the identity of each parameter, another module gets a graph of its own. The guard on
    ``self`` tells Dynamo that these are instances, which do not count against its limit on
    recompilations.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [placeholders[i]._dynamo_source for i in inputs]
    for source in sources:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
    for root in {_root_source(source) for source in sources}:
        if isinstance(root, LocalSource) and root.local_name == "self":
            install_guard(root.make_guard(GuardBuilder.ID_MATCH))


def _root_source(source: Any) -> Any:
    while hasattr(source, "base"):
        source = source.base
    return source


def parameter_names(gm: torch.fx.GraphModule) -> dict[str, str]:
    """Dynamo's flat placeholder names mapped to fully qualified parameter names."""
    return dict(gm.meta.get("dynamo_flat_name_to_original_fqn") or {})


def unwrap_module(module: nn.Module) -> nn.Module:
    """The user's module behind ``torch.compile``'s wrapper."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def modules_compiled_with(backend: Callable[..., Any]) -> list[nn.Module]:
    """Every module that ``torch.compile`` wrapped for ``backend``. Slow: looks at all objects."""
    wrappers = [o for o in gc.get_objects() if type(o) is OptimizedModule]
    return [unwrap_module(w) for w in wrappers if _backend_of(w) is backend]


def _backend_of(wrapper: OptimizedModule) -> Any:
    compiler: Any = wrapper.dynamo_ctx.callback
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return getattr(compiler, "compiler_fn", compiler)


def modules_on_stack() -> list[nn.Module]:
    """Modules whose call is in progress, innermost first, without ``torch.compile``'s wrappers.

    A Dynamo backend is not told which module it compiles for, nor which model that module is a
    part of; the calls that led to it say both.
    """
    found: list[nn.Module] = []
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = unwrap_module(owner)
            if not any(module is known for known in found):
                found.append(module)
        frame = cast(Any, frame.f_back)
    return found


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether the user registered a hook that runs on the parameter's gradient."""
    return bool(getattr(parameter, "_backward_hooks", None))


def post_accumulate_hooks(parameter: torch.Tensor) -> int:
    """How many post-accumulate-gradient hooks the parameter has."""
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> int:
    """How many hooks run before a step of the optimizer, its own and those of all optimizers."""
    return len(_global_optimizer_pre_hooks) + len(optimizer._optimizer_step_pre_hooks)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Runs the class's ``step`` itself."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def first_step_post_hook(
    optimizer: torch.optim.Optimizer, hook: Callable[[torch.optim.Optimizer, Any, Any], None]
) -> None:
    """Runs ``hook`` after each step of the optimizer, before every hook of the user's."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


# --- autograd -------------------------------------------------------------------------------


def below_autograd() -> AbstractContextManager[object]:
    """Operators inside go straight to their kernels, for code that needs no gradients: functional
    collectives and their waits otherwise pass through Python in autograd, 10 us each."""
    return cast(AbstractContextManager[object], torch._C._AutoDispatchBelowAutograd())


def backward_id() -> int:
    """An id of the ``backward()`` that runs in this thread, -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def accumulates(node: Any) -> bool:
    """Whether the running ``backward()`` will accumulate into the leaf whose gradient accumulator
    (an autograd node) this is: not if it was given other ``inputs``.

    Raises:
        RuntimeError: this is ``torch.autograd.grad`` with respect to that leaf.
    """
    return bool(torch._C._will_engine_execute_node(node))


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Runs ``callback`` when the running ``backward()`` has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- reads of parameters --------------------------------------------------------------------


def register_wait(tensor: torch.Tensor, work: Work) -> None:
    """Lets the next ``wait_tensor`` on ``tensor``, here or in a compiled graph, wait for ``work``.

    ``work`` may be a Python object; c10d keeps only its C++ half, so keep it alive until then.
    """
    _register_work(tensor, work)


def wait_in_place(tensor: torch.Tensor) -> None:
    """Waits for all works that are registered for ``tensor``, and forgets them."""
    with below_autograd():
        torch.ops._c10d_functional.wait_tensor.default(tensor)


def hands_out_parameters(module: nn.Module) -> bool:
    """Whether the module's parameters are read through the methods of ``nn.Module``."""
    return not isinstance(module, torch.jit.ScriptModule) and type(module._parameters) is dict


def watch_parameter_reads(before_read: Callable[[object], None]) -> None:
    """Calls ``before_read`` with each value that a module is about to hand out: on attribute access
    and for ``parameters()``, state dicts, conversions and copies. For the life of the process.

    ``nn.Module`` has no hook for this. Dynamo, which knows ``nn.Module.__getattr__`` by identity
    and models it without running it, is told of the new one; what it compiles is not watched.
    """
    get, members = nn.Module.__getattr__, nn.Module._named_members

    @functools.wraps(get)
    def __getattr__(self: nn.Module, name: str) -> Any:
        value = get(self, name)
        if not torch.compiler.is_compiling():
            before_read(value)
        return value

    @functools.wraps(members)
    def _named_members(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        for name, member in members(self, *args, **kwargs):
            if not torch.compiler.is_compiling():
                before_read(member)
            yield name, member

    def reading_own(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                for parameter in self._parameters.values():
                    before_read(parameter)
            return method(self, *args, **kwargs)

        return wrapper

    nn.Module.__getattr__ = __getattr__  # type: ignore[method-assign]
    nn.Module._named_members = _named_members  # type: ignore[method-assign]
    for name in ("_save_to_state_dict", "_load_from_state_dict", "_apply", "__reduce_ex__"):
        setattr(nn.Module, name, reading_own(getattr(nn.Module, name)))
    for module in (torch._dynamo.utils, torch._dynamo.variables.user_defined):
        if getattr(module, "unpatched_nn_module_getattr", None) is get:
            setattr(module, "unpatched_nn_module_getattr", __getattr__)  # noqa: B010


def watch_compiled_frames(compiled: Callable[[str, bool, bool], None]) -> None:
    """Calls ``compiled`` after each frame that Dynamo compiled, for any backend, with the frame's
    name, whether it gives parameters of modules to something else than its graph, and whether it
    uses any."""

    def hook(code: Any, new_code: Any) -> None:
        uses = "_parameters" in new_code.co_names
        compiled(code.co_qualname, _passes_parameters_on(new_code), uses)

    torch._dynamo.convert_frame.register_bytecode_hook(hook)


def _passes_parameters_on(code: Any) -> bool:
    """Whether Dynamo's bytecode loads a module's parameters elsewhere than among the arguments of
    the compiled graph, which it pushes, followed by its arguments, before it calls it."""
    depth, called = 0, None
    for instruction in dis.get_instructions(code):
        if called is None and "__compiled_fn" in str(instruction.argval):
            called = depth + 1  # the stack's depth when the call has left its result there
        elif instruction.argval == "_parameters" and called is None:
            return True
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if instruction.opname.startswith("CALL") and depth == called:
            called = None
    return False


# --- process groups -------------------------------------------------------------------------


def group_store(group: dist.ProcessGroup | None) -> Store:
    """The store under the default group, with keys of their own for each group of ranks."""
    store = dist.distributed_c10d._get_default_store()
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    return PrefixStore("fxcomm/" + ",".join(map(str, ranks)), store)


def private_store() -> Store:
    """A store of this process alone."""
    return HashStore()


def group_backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of the backend that serves ``device`` in ``group``: "gloo", "nccl", "fake", ..."""
    config = dist.get_backend_config(group)
    by_device = dict(item.split(":") for item in config.split(",") if ":" in item)
    return by_device.get(device.type, config)


def group_name(group: dist.ProcessGroup) -> str:
    """The name under which functional collectives find the group."""
    return str(group.group_name)


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The time after which the group's collectives fail."""
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def new_group(ranks: list[int], backend: str, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A group that only its ``ranks`` open, under a name that is equal on them.

    The name that ``dist.new_group`` would give it depends on how many groups a rank is in, which
    ranks need not agree on; they would wait for each other in vain.
    """
    c10d = dist.distributed_c10d
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        backend,
        c10d._get_default_store(),
        cast(Any, name),  # a NewType of str in newer releases
        timeout=timeout,
        device_id=c10d._get_default_group().bound_device_id,
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return cast(dist.ProcessGroup, group)


def close_group(name: str) -> None:
    """Closes the group that :func:`new_group` opened under ``name``, if it is still open.

    NCCL asks every rank to close its groups in the same order. gloo waits for this rank's queued
    work, then ends the group's threads and connections, and asks nothing of other ranks.
    """
    try:
        group = _resolve_process_group(cast(Any, name))
    except RuntimeError:
        return  # closed with the default group
    dist.destroy_process_group(group)


def all_gather_in_place(buffer: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Starts to gather ``buffer`` from every rank's ``shard``, which is a view of it."""
    # Renamed in torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(buffer, shard, group=group, async_op=True)


def send(group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
    """Starts to send ``tensor`` to the group's rank ``peer``. ``dist.isend`` takes several times as
    long to find out what it is called with."""
    return group.send([tensor], peer, tag)


def receive(group: dist.ProcessGroup, tensor: torch.Tensor, peer: int, tag: int) -> Work:
    """Starts to receive ``tensor`` from the group's rank ``peer``."""
    return group.recv([tensor], peer, tag)


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that functional collectives know by ``name``."""
    return _resolve_process_group(cast(Any, name))


def register_work(tensor: torch.Tensor, work: Work) -> None:
    """Makes ``_c10d_functional.wait_tensor`` of ``tensor`` wait for ``work``, too."""
    torch._C._distributed_c10d._register_work(tensor, work)


def lower_as_collective(operator: torch._ops.OpOverload) -> None:
    """Has Inductor take ``operator`` (one tensor and constants to one tensor) for a collective: it
    keeps its place, and its input lives until its result is waited for."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    @register_lowering(operator, type_promotion_kind=None)
    def lower(sent: Any, *constants: Any) -> Any:
        made = ir._CollectiveKernel.create_out_of_place(operator, sent, *constants)
        return ir.TensorBox.create(cast(Any, made))


def without_memory() -> AbstractContextManager[object]:
    """Context in which tensors are made without memory or values, whatever their device."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


# --- structured logs ------------------------------------------------------------------------


def structured_logs() -> bool:
    """Whether somebody takes torch's structured logs: TORCH_TRACE names a folder for them."""
    # A handler without a folder goes with the first record.
    handlers = torch._logging._internal.trace_log.handlers
    return any(getattr(handler, "root_dir", "") is not None for handler in handlers)


def current_compile_id() -> Any:
    """The id of the compilation that runs in this thread, None outside of one."""
    return CompileContext.current_compile_id()


def log_artifact(name: str, text: Callable[[], str], compile_id: Any) -> None:
    """Puts a text, which is made only if it is wanted, into the structured logs, where tlparse
    shows it with the compilation that runs now, or else with that of ``compile_id``."""
    if structured_logs():
        torch._logging._internal.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "string"},
            payload_fn=text,
            expect_trace_id=False,
            compile_id=compile_id,
        )


def size_hint(size: torch.SymInt) -> int | None:
    """What a symbolic size was in the example inputs, None if that is not known."""
    hint = size.node.hint
    return None if hint is None else int(hint)
