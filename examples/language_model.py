"""python examples/language_model.py [--nodes 4] [--steps 60]

A causal language model of the transformers library (a small Llama that reads characters) is trained on nodes of which
each has a part of the parameters, of their gradients and of AdamW's states, and then writes. The model and its
`generate` are the library's, unchanged: `dt.fully_shard` on each layer and on the model is all that differs from the
program for one process, which trains afterwards with whole batches. Losses and text are the same.
"""

import argparse
import sys

import torch

import disttensor as dt

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit("this example needs transformers: pip install 'disttensor[transformers]'")

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--steps", type=int, default=50)
options = parser.parse_args()

text = "the quick brown fox jumps over the lazy dog. "
letters = sorted(set(text))
corpus = torch.tensor([letters.index(letter) for letter in text * 20])
LENGTH, ROWS = 32, 16


def train(mesh: dt.meshes.Mesh | None) -> tuple[list[float], str]:
    """The losses, and what the model writes behind the text's first words."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=letters.index(" "),
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if mesh:
        for layer in model.model.layers:
            dt.fully_shard(layer, mesh)
        dt.fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(options.steps):
        starts = torch.randint(len(corpus) - LENGTH, (ROWS,), generator=generator)
        batch = torch.stack([corpus[start : start + LENGTH] for start in starts.tolist()])
        if mesh:
            batch = dt.shard(batch, mesh, dp=0)  # each node has its share of the rows
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((dt.all_reduce(loss.detach(), "avg", over="dp") if mesh else loss).item())
    prompt = corpus[:9].unsqueeze(0).to(mesh.device if mesh else "cpu")
    model.eval()
    written = model.generate(prompt, max_new_tokens=36, do_sample=False)
    words = "".join(letters[k] for k in written[0].tolist())
    return losses, words


with dt.init_master_worker(nodes=options.nodes, threads=1):
    losses, written = train(dt.mesh(dp=options.nodes))
alone, same = train(None)

for step in range(9, options.steps, 10):
    print(f"step {step}: loss {losses[step]:.4f} on {options.nodes} nodes, {alone[step]:.4f} in one process")
print(f"it writes: {written}")
print(f"one process writes the same: {written == same}")
assert torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-2)
