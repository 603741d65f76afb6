"""Pipeline: stages of a module on places of their own, through which micro-batches go in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ...collectives import all_reduce
from ...collectives.over_dims import Over
from ...errors.argument_checks import needing, one_of
from ...meshes import Mesh
from ...meshes.cut import cut_of
from ...runtime.process.spelling import shown
from ...session import current
from ...session.places import MeshPlace, Place
from ..averaging import reduce_gradients
from ..named import dims
from .busy import Shares, measured
from .microbatches import Loss, checked, cut, joined
from .passing import Pass, Stage
from .schedules import SCHEDULES, expected_shares, forward_only, in_ticks
from .split import Trace, in_words, make_on_device, sizes_of, traces


class Pipeline(nn.Module):
    """A module whose stages are on places of their own, and that trains on micro-batches in turns (GPipe, 1F1B).

    While one stage works on a micro-batch, the others work on others. Activations and gradients go from place to place
    directly. ``step`` computes what a backward pass of the unsplit module would; optimizers, schedulers and checkpoints
    are those of the unsplit module, whose names the parameters have.

        >>> pipeline = dt.training.Pipeline([first, second], ["node:0", "node:1"], microbatches=4)
        >>> optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        >>> loss = pipeline.step(x, target, F.cross_entropy)
        >>> optimizer.step()
    """

    @needing("dt.training.Pipeline(stages, ['node:0', 'node:1'], microbatches=4)", "stages", "places", "microbatches")
    def __init__(
        self,
        stages: Sequence[nn.Module] | nn.Module,
        places: Sequence[Any],
        *,
        microbatches: int,
        schedule: str = "1f1b",
        over: Over = "dp",
        split_spec: Mapping[str, Any] | None = None,
        example: Any = None,
    ) -> None:
        """Moves each stage to its place.

        Args:
            stages: modules that are called one after the other, as by nn.Sequential; or an nn.Sequential of them; or,
                with ``split_spec``, any module, which is still local.
            places: for each stage a node ("node:1", 1, a torch.device) or a mesh (``mesh.slice(pp=1)``, its device);
                all nodes, or all meshes with the same dims. One that is named several times has several stages.
            microbatches: in so many parts a batch is cut.
            schedule: "1f1b", where stage k of n keeps n - k micro-batches at most until their backward passes, or
                "gpipe", where each stage keeps all of them.
            over: the dims of meshes along which ranks have rows of their own, as for DataParallel. Others have the same
                rows.
            split_spec: where torch.export is to cut a module, as for torch.distributed.pipelining.pipeline:
                ``{"layers.2": SplitPoint.BEGINNING}``. ``pipe_split()`` in its forward cuts, too.
            example: a micro-batch with which the module is traced, once in training mode and once in eval mode: a
                tensor, or a tuple of what its forward takes. All micro-batches have to have its sizes.

        Raises TypeError for a stage that is no module, or a split without an example; ValueError for another number of
        places than stages, places that differ, an unknown dim or schedule, no positive number of micro-batches, or an
        unknown name in ``split_spec``; RuntimeError for a module that can't be traced; NodeLost.
        """
        super().__init__()
        self._microbatches = checked(microbatches)
        one_of("schedule", schedule, tuple(SCHEDULES))
        self._schedule = schedule
        self._traces: dict[bool, Trace] | None = None
        if split_spec is None and example is None:
            named = _named(stages)
            parts = [module for _, module in named]
            self._modes = dict.fromkeys((True, False), _on_places(parts, places, dims(over)))
            for stage in reversed(self._modes[True]):  # what several have is where the first of them is
                stage.module.to(stage.place.device)
        else:
            whole: Any = stages
            self._traces = traces(whole, split_spec, example)
            self._modes = {mode: _on_places(t.graphs, places, dims(over)) for mode, t in self._traces.items()}
            _move_traced(whole, self._modes, self._traces)
            named = list(whole.named_children())
            self._take_over(whole)
        for stage in [*self._modes[True], *self._modes[False]]:
            stage.borrowed = _borrowed(stage)
        for name, module in named:
            self._register_part(name, module)
        count = len(self._modes[True])
        self._ticks = in_ticks(SCHEDULES[schedule](count, self._microbatches))
        self._forward_ticks = in_ticks(forward_only(count, self._microbatches))

    def forward(self, x: Any) -> Any:
        """Returns the output for a batch, on the last stage's place, without gradients.

        Micro-batches go through the stages in turns, and their outputs are concatenated in dimension 0. ``x`` is as for
        ``step``. Returns at once. Raises ValueError for a batch that can't be cut, TypeError for outputs that can't be
        put together, what a stage raises, NodeLost.
        """
        with torch.no_grad():
            stages = self._modes[self.training]
            parts, _ = self._cut(x)
            work = Pass(stages, parts)
            work.run(self._forward_ticks)
            return joined(work.outputs)

    def step(self, x: Any, target: Any, loss_fn: Loss) -> torch.Tensor:
        """Adds the gradients of a batch's mean loss to those of the parameters, and returns the loss.

        Args:
            x: what the first stage takes: a tensor, or tuples, lists and dicts of them, local or on its place. Tensors
                are cut in dimension 0.
            target: what ``loss_fn`` takes beside the output, cut in the same way; it goes to the last stage's place.
            loss_fn: ``loss_fn(output, target)`` returns the mean loss of a micro-batch. Micro-batches with more rows
                count more.

        On meshes gradients and loss are means over the ranks, too, reduced once. The loss is on the last stage's place
        and has no gradient. Returns at once. Raises ValueError for a batch that can't be cut, or a loss that is no
        mean; what a stage or ``loss_fn`` raises, with the stage and the micro-batch in a note; NodeLost. After an error
        some gradients have been added to: ``zero_grad``.
        """
        stages = self._modes[self.training]
        last = stages[-1]
        parts, rows = self._cut(x)
        targets, others = cut(target, "target", last.place, last.over, self._microbatches)
        if rows and others and rows != others:
            raise ValueError(f"Pipeline: x has {sum(rows)} rows, and target {sum(others)}; each row has its own target")
        rows = rows or others or [1] * self._microbatches
        work = Pass(stages, parts, loss_fn, targets, [n / sum(rows) for n in rows])
        work.run(self._ticks)
        work.give_back()
        total = work.total
        assert total is not None
        if last.over:
            for stage in stages:
                reduce_gradients(stage.module, stage.over, skip=_reduced_elsewhere(stage))
            total = all_reduce(total, "avg", over=last.over)
        return total

    def measure(self) -> AbstractContextManager[Shares]:
        """Measures for which part of the time each node works, inside of a ``with`` block; waits at both ends.

            with pipeline.measure() as shares:
                for x, y in batches:
                    pipeline.step(x, y, F.cross_entropy)
                    optimizer.step()
            print(shares)

        The times are those of the nodes' own clocks. Beside them stands what the schedule would give if a backward
        pass took twice as long as a forward pass, all stages took the same time, and nothing else took any. Raises
        NodeLost.
        """
        places = [stage.place for stage in self._modes[True]]
        return measured(places, expected_shares(self._ticks, places))

    def extra_repr(self) -> str:
        """Returns the places and the schedule, for ``print(pipeline)``."""
        places = ", ".join(str(stage.place) for stage in self._modes[True])
        return f"places=[{places}], microbatches={self._microbatches}, schedule={self._schedule!r}"

    def _cut(self, x: Any) -> tuple[list[Any], list[int]]:
        """Returns the micro-batches of ``x``, and their rows. Raises ValueError where they are not as in a trace."""
        first = self._modes[True][0]
        parts, rows = cut(x, "x", first.place, first.over, self._microbatches)
        if self._traces is None:
            return parts, rows
        flat = [tree_flatten(part if isinstance(part, tuple) else (part,))[0] for part in parts]
        wanted = self._traces[self.training].sizes
        for i, leaves in enumerate(flat):
            found = sizes_of(leaves)
            if found != wanted:
                raise ValueError(
                    f"Pipeline: micro-batch {i} of x has {in_words(found)}, and the module was traced with "
                    f"{in_words(wanted)}: its sizes are in the trace; batches of another size (drop_last=True), or "
                    "another example="
                )
        return [tuple(leaves) for leaves in flat], rows

    def _take_over(self, module: nn.Module) -> None:
        """Has the parameters and buffers of a traced module itself, under their names; and its mode."""
        for name, parameter in module._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            self.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
        for stage in [*self._modes[True], *self._modes[False]]:
            stage.buffers = [(name, self if owner is module else owner, key) for name, owner, key in stage.buffers]
        self.training = module.training

    def _register_part(self, name: str, module: nn.Module) -> None:
        """Makes a module a submodule of this one, under its name in the unsplit module."""
        if hasattr(self, name):
            raise ValueError(f"Pipeline: a module called {name!r} would hide Pipeline.{name}; call it otherwise")
        self.add_module(name, module)


def _named(stages: Any) -> list[tuple[str, nn.Module]]:
    """Returns the stages with the names that they have in an nn.Sequential."""
    if isinstance(stages, nn.Sequential):
        return list(stages._modules.items())  # with one that stands twice
    if isinstance(stages, nn.Module) or not isinstance(stages, Sequence):
        raise TypeError(
            f"Pipeline takes a list of modules, or an nn.Sequential, not {type(stages).__name__}; "
            "split_spec=... cuts a module in stages"
        )
    for k, module in enumerate(stages):
        if not isinstance(module, nn.Module):
            raise TypeError(f"Pipeline: stage {k} has to be a module, not {type(module).__name__}")
    return [(str(k), module) for k, module in enumerate(stages)]


def _on_places(modules: Sequence[nn.Module], places: Any, over: tuple[str, ...]) -> list[Stage]:
    """Returns the stages, which are not moved yet."""
    return [
        # a stage on a node has no dims along which its batches are cut
        Stage(k, module, place, over if isinstance(place, MeshPlace) else ())
        for k, (module, place) in enumerate(zip(modules, _places(places, over, len(modules)), strict=True))
    ]


def _move_traced(module: nn.Module, modes: Mapping[bool, Sequence[Stage]], found: Mapping[bool, Trace]) -> None:
    """Moves what a traced module has: each tensor to the place of the first stage that uses it."""
    own = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    settled: set[str] = set()
    for mode in (True, False):
        for stage in modes[mode]:
            stage.traced = True
            graph = found[mode].graphs[stage.index]
            make_on_device(graph, stage.place.device)
            for name in [name for name, _ in graph.named_buffers(remove_duplicate=False) if name in own]:
                path, _, key = name.rpartition(".")
                owner = module.get_submodule(path)
                graph.get_submodule(path)._buffers[key] = torch.empty(0, device="cpu")  # it is lent for each pass
                stage.buffers.append((name, owner, key))
                if name not in settled:
                    settled.add(name)
                    buffer = owner._buffers[key]
                    assert buffer is not None
                    owner._buffers[key] = buffer.to(stage.place.device)
        modes[mode][-1].output = found[mode].output
    for mode in (False, True):
        for stage in reversed(modes[mode]):
            stage.module.to(stage.place.device)


def _places(places: Any, over: tuple[str, ...], stages: int) -> list[Place]:
    """Returns the places of the stages."""
    if isinstance(places, (str, torch.device, Mesh, Mapping)) or not isinstance(places, Sequence):
        raise TypeError(f"Pipeline: places is a list with a place for each stage, not {shown(places)}")
    if len(places) != stages or not stages:
        raise ValueError(
            f"Pipeline: {stages} stages and {len(places)} places; each stage has a place, and several may have the "
            "same: places=['node:0', 'node:1'] * 2"
        )
    known = current.session().places
    found = [place._place if isinstance(place, Mesh) else known.at(place) for place in places]
    for k, place in enumerate(found):
        # values pass from rank to rank, so stages have the same dims, or none
        ours, first = ((p.dims if isinstance(p, MeshPlace) else None) for p in (place, found[0]))
        if ours != first:
            raise ValueError(
                f"Pipeline: stage 0 is on {found[0]} and stage {k} on {place}; all are on nodes, or all on meshes with "
                "the same dims (mesh.slice(pp=k))"
            )
        # only a mesh has dims to look up
        if isinstance(place, MeshPlace):
            for dim in over:
                place.groups(dim, "Pipeline")
    return found


def _reduced_elsewhere(stage: Stage) -> list[str]:
    """Returns the parameters whose gradients another stage reduces, or ``fully_shard`` has, along whose dim they are
    cut."""
    cut = [
        name
        for name, parameter in stage.module.named_parameters()
        if any(each.over in stage.over for each, _ in cut_of(parameter))
    ]
    return [*(name for name, _ in stage.borrowed), *cut]


def _borrowed(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that a stage shares with an earlier one, at whose place they are.

    Raises ValueError for a buffer of that kind: which stage's values it has, nobody has said.
    """
    for name, buffer in stage.module.named_buffers():
        if buffer.device != stage.place.device:
            raise ValueError(
                f"Pipeline: stage {stage.index} shares a module with an earlier stage, and that has a buffer, "
                f"{name!r}; give each stage a module of its own"
            )
    return [(name, p) for name, p in stage.module.named_parameters() if p.device != stage.place.device]
