"""python tools/ci/library_models.py [--count 45] [--models bert gpt2] [--seconds 300] [--results FILE.jsonl]

Models of transformers, trained on a node by ``torch.compile(model)``, and by ``backend="aot_eager"`` locally. Which
ones, a rule says (`chosen`). Each has a process of its own, and FILE keeps what is known of it: it is not tried again.
What is printed is tests/ops/library_models.txt: how many graphs dynamo has made for the node, and for the local model;
for how many reasons it has ended one, there and locally; how many graphs run operator by operator; the worst difference
of a result or gradient from the local one, over the largest number of that (0: all bits are alike).

The node is a thread, which is quick. Then it has one generator of random numbers with the script, whose state dynamo
saves while it traces, and restores: a model whose numbers differ is tried again, on a node that is a process.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.backends.common  # once for all processes, as all that follows
import transformers  # type: ignore[import-untyped, unused-ignore]
import transformers.masking_utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto as auto
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map_only

import disttensor as dt

#: The most parameters of a model that is tried.
PARAMETERS = 1_000_000
IDS, WORDS, IMAGE = 100, 8, 32
#: What a whole number of a configuration becomes, by its name: the first pattern counts.
NUMBERS = [
    (r".*vocab_size|.*vocabulary_size", IDS),
    (r"(pad|bos|eos|sep|cls|decoder_start|mask)_token_id", 1),
    (r"num_labels|num_classes", 5),
    (r".*image_size", IMAGE),
    (r".*patch_size|patch_stride", 8),
    (r"num_channels|in_channels|in_chans|num_image_channels", 3),
    (r".*(experts_per_tok\w*|top_?k)", 2),
    (r"n_group|topk_group", 1),
    (r".*(n|num)(_\w+)?_experts", 4),
    (r".*(num_key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num)", 2),
    (r".*heads?|n_head", 4),
    (r".*head_dim|d_kv|kv_channels|.*_head_size|d_head", 8),
    (r".*lora_rank", 8),
    (r".*max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|.*window(_size)?", 64),
    (r".*(layers?|layers_num|n_layer|num_\w*blocks|depth)", 2),
    (r".*(intermediate|inner|ffn|mlp)\w*(size|dim)|d_ff|n_inner|d_inner|ffn_hidden_size|\w+_ffn_dim", 64),
    (r".*(hidden_size|hidden_dim|embedding_size|embedding_dim|embed_dim)|d_model|n_embd|dim|width|d_embed", 32),
]  # fmt: skip
#: The kinds of a type's models: the first that it has is taken.
HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)  # fmt: skip
HEAD = f"""\
# transformers {transformers.__version__}, torch {torch.__version__.partition("+")[0]}
{"# type":28s} graphs locally breaks locally by operator difference"""
Inputs = dict[str, Any]


class Unfit(Exception):
    """The rule leaves a model out: its message says why."""


def types() -> list[str]:
    """Returns the types that have a model, in the order in which they are tried: that of their names' hashes."""
    return sorted(auto.MODEL_MAPPING_NAMES, key=lambda name: hashlib.sha256(name.encode()).digest())


def _small(default: Any) -> dict[str, Any]:
    """Returns what makes a configuration small, and those that it has within."""
    found: dict[str, Any] = {}
    for name, value in vars(default).items():
        if isinstance(value, transformers.PretrainedConfig):
            found[name] = _small(value)
        elif type(value) is int:
            small = next((number for pattern, number in NUMBERS if re.fullmatch(pattern, name)), value)
            found |= {name: small} if small != value else {}
    return found


def made(name: str) -> tuple[torch.nn.Module, Callable[[int], Inputs]]:
    """Returns a type's model with random weights, and what makes its inputs of a length. Raises Unfit, and what the
    library raises where a configuration can't be made of numbers alone."""
    mappings = (getattr(auto, head) for head in HEADS)
    kind = next(names[name] for names in mappings if name in names)
    kind = getattr(transformers, kind if isinstance(kind, str) else kind[0])
    default = transformers.CONFIG_MAPPING[name]()
    config = type(default)(**_small(default))
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > PARAMETERS:
        raise Unfit(f"has {count} parameters")
    torch.manual_seed(0)
    model = kind(config).train()
    if kind.main_input_name == "input_ids":
        cached = {"use_cache": False} if hasattr(config, "use_cache") else {}
        both = ["input_ids", *(["decoder_input_ids"] if config.is_encoder_decoder else [])]
        return model, lambda n: {each: torch.randint(3, IDS, (2, n)) for each in both} | cached
    if kind.main_input_name == "pixel_values":
        channels = getattr(config, "num_channels", 3)
        return model, lambda n: {"pixel_values": torch.randn(n // 4, channels, IMAGE, IMAGE)}
    raise Unfit(f"takes {kind.main_input_name}")


def step(model: Any, call: Any, inputs: Inputs, seed: int) -> list[torch.Tensor]:
    """Returns results and gradients of a call."""
    torch.manual_seed(seed)
    outputs = [t for t in tree_leaves(list(call(**inputs).values())) if isinstance(t, torch.Tensor)]
    sum(t.float().square().mean() for t in outputs if t.requires_grad).backward()  # type: ignore[union-attr]
    found = [*outputs, *(p.grad for p in model.parameters() if p.grad is not None)]
    for p in model.parameters():
        p.grad = None
    return [t.detach().cpu() for t in found]


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Returns the worst difference of two lists, over the largest number of its tensor; 0 where all bits are alike."""
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return float("inf")
    pairs = ((a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if not torch.equal(a, b))
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a.numel()), default=0.0)


def compiled(
    model: Any, backend: str, rounds: list[tuple[int, Inputs]]
) -> tuple[dict[str, Any], list[list[torch.Tensor]]]:
    """Returns what dynamo has counted in the first round, and what all have given."""
    torch.compiler.reset()
    counters.clear()
    call, said, found = torch.compile(model, backend=backend), dict[str, Any](), []
    for seed, inputs in rounds:
        found.append(step(model, call, inputs, seed))
        if not said:
            breaks = [re.sub(r"\s+", " ", str(text))[:100] for text in counters["graph_break"]]
            said = {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}
    return said, found


def tried(name: str, longer: bool, launcher: str) -> dict[str, Any]:
    """Returns what is known of a type: ``unfit`` by the rule, or how it is trained."""
    began = time.process_time()
    try:
        model, inputs = made(name)
        with torch.random.fork_rng():
            step(model, model, inputs(WORDS), 0)
    except Unfit as error:
        return {"unfit": str(error)}
    except Exception as error:
        return {"unfit": f"{type(error).__name__}: {error}"[:200]}
    rounds = [(seed, inputs(WORDS)) for seed in (1, 2, 3)]  # operator by operator, recorded, and played
    if longer:
        rounds.append((4, inputs(WORDS + 4)))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    said: dict[str, Any] = {}
    said["local"], theirs = compiled(model, "aot_eager", rounds)
    model.load_state_dict(state)
    allowed = ["transformers::*"]  # an operator of mixtures of experts is Python that reads values
    with (
        dt.init_master_worker(nodes=1, launcher=launcher, allow_ops=allowed),
        warnings.catch_warnings(record=True) as caught,
    ):
        if launcher != "inproc":
            dt.run(exec, "import transformers.integrations.moe", node=0)
        warnings.simplefilter("always")
        model = model.to("node:0")
        there = [(seed, tree_map_only(torch.Tensor, lambda t: t.to("node:0"), x)) for seed, x in rounds]
        try:
            said["node"], ours = compiled(model, "inductor", there)
        except Exception as error:
            said["failed"] = f"{type(error).__name__}: {error}"[:600]
            return said
    said["by operator"] = [str(each.message)[:300] for each in caught if "operator by operator" in str(each.message)]
    said["difference"] = [difference(a, b) for a, b in zip(ours, theirs, strict=True)]
    said["seconds"] = round(time.process_time() - began, 1)
    return said


def row(name: str, found: dict[str, Any]) -> str:
    """Returns the table's line of a type."""
    for word in ("unfit", "failed"):
        if word in found:
            return f"{name:28s} {word}: {re.sub(r'[^ -~]+', ' ', found[word])[:80]}".rstrip()
    counts = [found[where][of] for of in ("graphs", "breaks") for where in ("node", "local")]
    graphs, local_graphs, breaks, local_breaks = (n if isinstance(n, int) else len(n) for n in counts)
    numbers = f"{graphs:6d} {local_graphs:7d} {breaks:6d} {local_breaks:7d} {len(found['by operator']):11d}"
    return f"{name:28s} {numbers} {max(found['difference']):10.1g}"


def _child(name: str, longer: bool, launcher: str, answers: Connection) -> None:
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115  # the process ends with it
    answers.send(tried(name, longer, launcher))


def in_process(name: str, longer: bool, seconds: float, launcher: str = "inproc") -> dict[str, Any]:
    """Tries a type in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(name, longer, launcher, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return {"failed": f"no end within {seconds:.0f} s"}
        with suppress(EOFError):
            return receiver.recv()  # type: ignore[no-any-return]
        process.join()
        return {"failed": f"the process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def chosen(count: int, known: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields types, of each of which ``known`` has to say then what it is, until so many are not unfit."""
    fit = 0
    for name in types():
        if fit == count:
            return
        yield name
        fit += "unfit" not in known[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=45)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--longer", action="store_true", help="another shape at last")
    parser.add_argument("--results", type=Path, default=Path("library_models.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    known: dict[str, dict[str, Any]] = {}
    if options.results.exists():
        known = dict(json.loads(line) for line in options.results.read_text().splitlines())
    print(HEAD)
    for name in options.models or chosen(options.count, known):
        if name not in known:
            known[name] = in_process(name, options.longer, options.seconds)
            if any(known[name].get("difference", [])):
                known[name] = in_process(name, options.longer, options.seconds, "local")
            with options.results.open("a") as file:
                file.write(json.dumps([name, known[name]]) + "\n")
        print(row(name, known[name]), flush=True)


if __name__ == "__main__":
    main()
